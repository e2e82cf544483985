"""Maps each top-level room to a sub-package of `llmc`; sub-packages are found, so that none can be forgotten."""

from setuptools import find_packages, setup

ROOMS = ("artifacts", "plugins", "profiles", "builder", "calibration", "runtime", "cli")
FOUND = find_packages(".", include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])
FACE = ["llmc", *(f"llmc.{name}" for name in find_packages("llmc"))]

setup(
    packages=[*FACE, *(f"llmc.{name}" for name in FOUND)],
    package_dir={"llmc": "llmc", **{f"llmc.{name}": name.replace(".", "/") for name in FOUND}},
    package_data={"": ["*.h", "*.cpp", "*.yaml", "*/*.yaml", "*.jinja", "*.css", "*.json"]},
)
