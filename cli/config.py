"""`llmc build --config build.yaml`: the options of a command from a file; those given on the command line win.

Comes in: a YAML mapping of option names (without dashes in front) to values. Goes out: defaults of the click command,
checked. Must not know: what the options mean. A relative path is meant from the file's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmc.profiles.reading import Fields


def load_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """An eager option's callback. Raises UsageError naming file, key and value."""
    if path is None:
        return
    options = {
        name: parameter
        for parameter in context.command.params
        if isinstance(parameter, click.Option) and (name := option_name(parameter)) not in ("config", "help")
    }
    fields = Fields.read(path, sorted(options))
    defaults = {options[key].name: _checked(context, fields, key, options[key], path.parent) for key in fields.values}
    context.default_map = {**(context.default_map or {}), **defaults}


def option_name(parameter: click.Parameter) -> str:
    """`kv-cache-dtype` for --kv-cache-dtype."""
    return next(name.removeprefix("--") for name in parameter.opts if name.startswith("--"))


def _checked(context: click.Context, fields: Fields, key: str, option: click.Option, folder: Path) -> Any:
    value = fields.values[key]
    kind = option.type
    if option.is_flag:
        if not isinstance(value, bool):
            raise fields.fail(key, "true or false is needed")
        return value
    if isinstance(kind, click.types.IntParamType):
        if isinstance(value, bool) or not isinstance(value, int):
            raise fields.fail(key, "a whole number is needed")
    elif isinstance(kind, click.types.FloatParamType):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise fields.fail(key, "a number is needed")
    elif value is False and key == "gate":
        value = "off"  # which YAML reads as false
    elif not isinstance(value, str) or not value:
        raise fields.fail(key, "a text is needed; in quotes, where YAML would read something else")
    if isinstance(kind, click.Path) or (key == "profile" and ("/" in value or Path(value).suffix)):
        value = str(folder / value)
    try:
        kind.convert(value, option, context)
    except click.BadParameter as error:
        raise fields.fail(key, error.message) from None
    return value
