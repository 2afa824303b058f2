"""Option groups: frozen dataclasses whose fields are options that several commands share.

    @dataclass(frozen=True)
    class StoreOptions:
        store: Annotated[str, typer.Option("--store", "-s", help="A folder, or a URL.")]

    @app.command()
    @with_groups
    def ask(store: StoreOptions, json: AsJson = False) -> None: ...

An option is declared once, in its field: name, type, bounds, help, panel, default. A command that wants other defaults
gives an instance as the parameter's default: ``store: StoreOptions = StoreOptions("memory")``.

Knows typer's `Option` and `Argument`, not which groups or commands exist.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

R = TypeVar("R")


def with_groups(command: Callable[..., R]) -> Callable[..., R]:
    """The command as typer shall see it: each parameter that is an option group is replaced by the group's fields.

    The values of all options are checked before the command runs: a number that is not finite is an
    `InvalidInputError` that names the option.

    Raises:
        TypeError: two groups of the command have an option of the same name.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups = {each.name: each.annotation for each in parameters if _is_group(each.annotation)}
    expanded = [option for each in parameters for option in _expand(each)]
    names = [option.name for option in expanded]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"{command.__name__}: several option groups have the fields {', '.join(sorted(doubled))}")
    flags = {option.name: _flag(option) for option in expanded}

    @wraps(command)
    def run(**values: Any) -> R:
        for name, value in values.items():
            _check_finite(flags[name], value)
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    # typer reads the signature; `wraps` alone would show that of the command
    run.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in expanded}
    return run


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and is_dataclass(annotation)


def _expand(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """The parameter itself, or one for each field of its group. All are keyword-only, so that order is free."""
    if not _is_group(parameter.annotation):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    types = get_type_hints(parameter.annotation, include_extras=True)
    for field in fields(parameter.annotation):
        default = _default(field, parameter.default)
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
        )


def _default(field: "Field[Any]", group: Any) -> Any:
    if group is not inspect.Parameter.empty:
        return getattr(group, field.name)
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _flag(option: inspect.Parameter) -> str:
    """What a user writes: ``--store``; an argument's name in capitals."""
    if get_origin(option.annotation) is Annotated:
        for info in get_args(option.annotation)[1:]:
            names = [info.default if isinstance(info.default, str) else "", *(info.param_decls or ())]
            for name in names:
                if name.startswith("--"):
                    return str(name).split("/")[0]
    return option.name.upper()


def _check_finite(flag: str, value: Any) -> None:
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, float) and not math.isfinite(each):
            from cacheblend.core.errors import InvalidInputError

            raise InvalidInputError(f"{flag}: {each} is not a finite number")
