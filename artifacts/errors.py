"""The errors that a user can cause. Each prints as one message, without a traceback, and has an exit code.

A message names the field, the value, the file where there is one, and the remedy.
"""

from __future__ import annotations


class LlmcError(Exception):
    """The base: whatever the command line shows as one line."""

    exit_code = 1


class UsageError(LlmcError):
    """An option, profile or request that cannot be honoured."""

    exit_code = 2


class CheckpointError(LlmcError):
    """A checkpoint that is missing, damaged, or not the one that was pinned."""

    exit_code = 3


class PlanError(LlmcError):
    """A plan that is damaged, of another format, or for another machine."""

    exit_code = 3


class UnsupportedError(LlmcError):
    """A model that cannot be compiled, with the operator and module that stopped it."""

    exit_code = 4


class GateError(LlmcError):
    """An engine that is further from its checkpoint than the gate allows; `report` is the build's, not published."""

    exit_code = 5

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class EnvironmentFault(LlmcError):
    """Something of the machine is missing or exhausted: compiler, disk, memory, ISA."""

    exit_code = 6
