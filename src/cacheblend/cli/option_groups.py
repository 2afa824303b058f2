"""Options of commands: parameters, and option groups, which are frozen dataclasses whose fields are options.

    @dataclass(frozen=True)
    class StoreOptions:
        panel: ClassVar = "Model"
        store: str = option(..., "A folder, or a URL.", "-s")

    Seed = Annotated[int, option(..., "Of what is drawn.", least=0)]

    @app.command()
    def ask(store: StoreOptions, row: int = option(0, "Which row, from 0.", least=0), seed: Seed = 1) -> None: ...

An option is declared once: name, type, bounds, help, panel, default. A command that wants other defaults of a group
gives an instance as the parameter's default: ``store: StoreOptions = StoreOptions("memory")``. Fields that a group
names in ``no_options`` are none.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.options import OF_THE_GROUP
from cacheblend.engines.options import option as option

R = TypeVar("R")
N = TypeVar("N", int, float)


def with_groups(command: Callable[..., R]) -> Callable[..., R]:
    """The command as typer shall see it: each parameter that is an option group is replaced by the group's fields. The
    values of all options are checked before the command runs: a number that is not finite is an `InvalidInputError`
    that names the option. Two groups with an option of the same name are a `TypeError`."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups, expanded = dict[str, tuple[Any, list[Field[Any]]]](), list[inspect.Parameter]()
    for each in parameters:  # all are keyword-only, so that order is free
        group, given = each.annotation, each.default
        if not (isinstance(group, type) and is_dataclass(group)):
            expanded.append(_parameter(each.name, group, given))
            continue
        types, none = get_type_hints(group, include_extras=True), getattr(group, "no_options", ())
        groups[each.name] = group, [one for one in fields(group) if one.name not in none]
        for one in groups[each.name][1]:
            of = next(base for base in group.__mro__ if one.name in inspect.get_annotations(base))
            declared = one if one.metadata else one.default
            found = _parameter(one.name, types[one.name], declared, getattr(of, "panel", None))
            expanded.append(found if given is each.empty else found.replace(default=getattr(given, one.name)))
    names = [option.name for option in expanded]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise TypeError(f"{command.__name__}: several option groups have the fields {', '.join(sorted(doubled))}")
    flags = {option.name: _flag(option) for option in expanded}

    @wraps(command)
    def run(**values: Any) -> R:
        for name, value in values.items():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, float) and not math.isfinite(each):
                    raise InvalidInputError(f"{flags[name]}: {each} is not a finite number")
        for name, (group, options) in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in options})
        return command(**values)

    # typer reads the signature; `wraps` alone would show that of the command
    run.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in expanded}
    return run


def _parameter(name: str, annotation: Any, default: Any, panel: str | None = None) -> inspect.Parameter:
    """What typer is told of an option. `option` may stand as its default, or be what it is annotated with."""
    declared: Any = next((each for each in (default, *get_args(annotation)[1:]) if isinstance(each, Field)), None)
    if declared is not None:
        default = declared.default if declared is default else default
        names, own_panel, settings = declared.metadata["option"]
        if not any(each.startswith("--") for each in names):
            long = f"--{name.replace('_', '-')}"
            names = (f"{long}/--no-{long[2:]}" if default is True else long, *names)
        panel = panel if own_panel is OF_THE_GROUP else own_panel
        plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
        annotation = Annotated[plain, typer.Option(*names, rich_help_panel=panel, **settings)]
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(option: inspect.Parameter) -> str:
    """What a user writes: ``--store``; an argument's name in capitals."""
    for info in get_args(option.annotation)[1:]:
        if isinstance(info, OptionInfo):
            names = [info.default, *(info.param_decls or ())]  # of `Annotated`, typer takes the first name as `default`
            return next(str(name).split("/")[0] for name in names if str(name).startswith("--"))
    return option.name.upper()


def changed(*groups: tuple[Any, Any]) -> dict[str, object]:
    """The options of groups by their names, each group with its defaults: None for those that have them."""
    values = [(of, getattr(group, of.name), getattr(plain, of.name)) for group, plain in groups for of in fields(group)]
    named = [(_flag(_parameter(of.name, of.type, of if of.metadata else of.default)), *pair) for of, *pair in values]
    return {flag: None if value == plain else value for flag, value, plain in named}


def refuse_unused(given: Mapping[str, object], where: str) -> None:
    """Raises `InvalidInputError` for options that were given and have no effect there, by their names."""
    if unused := [name for name, value in given.items() if value is not None]:
        raise InvalidInputError(f"{' and '.join(unused)}: no effect {where}; leave it out")


def numbers(option: str, text: str, of: Callable[[str], N]) -> tuple[N, ...]:
    """``"0.45,0.3"`` as numbers."""
    try:
        found = tuple(of(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInputError(f"{option} {text}: expected a number, or several with commas") from error
    if not all(map(math.isfinite, found)):
        raise InvalidInputError(f"{option} {text}: expected finite numbers")
    return found


def names_in(values: Sequence[str] | None) -> tuple[str, ...]:
    """``["full,blend", "miss"]`` as single names."""
    return tuple(name.strip() for value in values or () for name in value.split(",") if name.strip())
