"""Which JSON schemas can be held: the keywords that the library compiles, and no others.

It ignores what it does not know, and some of what it knows in other places. An answer by a part of a schema is not what
was asked for, so every other keyword is refused by name.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cacheblend.core.errors import InvalidInputError

MOST_NESTED = 100
"""Lists and objects inside each other: compiling 1,000 takes minutes."""
SAYS_NOTHING = frozenset(
    ("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
)
"""Keywords that allow and forbid nothing."""
DEFINITIONS = frozenset(("$defs", "definitions"))
OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Keywords that are held beside each type."""
ALONE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
"""Keywords beside which the library ignores every other."""
FORMATS = frozenset(
    (
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"),
        *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    )
)


def check_schema(schema: Any, check_pattern: Callable[[str], None]) -> None:
    """Refuses a schema that would not be held whole.

    Args:
        schema: as JSON has it.
        check_pattern: raises for regular expressions that take too long.

    Raises:
        InvalidInputError: naming the keyword and where it is.
    """
    check_depth(schema)
    waiting = [("schema", schema)]
    while waiting:
        where, each = waiting.pop()
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise InvalidInputError(f"{where} must be an object, true or false, got {str(each)[:80]!r}")
        _check_keywords(where, each)
        if isinstance(each.get("pattern"), str):
            check_pattern(each["pattern"])
        waiting.extend(_inner(where, each))


def check_depth(value: Any) -> None:
    """Raises `InvalidInputError` for lists and objects that are nested too deeply; itself without recursion."""
    waiting = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if inner and depth > MOST_NESTED:
            raise InvalidInputError(f"the schema is nested deeper than {MOST_NESTED} lists and objects; use $ref")
        waiting.extend((one, depth + 1) for one in inner if isinstance(one, dict | list))


def _check_keywords(where: str, schema: Mapping[str, Any]) -> None:
    said = [name for name in schema if name not in SAYS_NOTHING and name not in DEFINITIONS]
    alone = next((name for name in ALONE if name in schema), None)
    if alone is not None:
        beside = {alone, "type"} if alone in ("const", "enum") else {alone}
        _check_only(where, said, beside, f"beside {alone}")
        if "type" in schema:
            _check_values(where, schema, _types(where, schema))
        return
    types = _types(where, schema) if "type" in schema else ()
    allowed = {"type"}.union(*(OF_TYPE[kind] for kind in types))
    _check_only(where, said, allowed, f"of type {' or '.join(types)}" if types else "without a type")
    if len(types) > 1 and set(said) != {"type"}:
        raise InvalidInputError(f"{where} has several types and {said[-1]!r}: write it as anyOf of one type each")
    if ("pattern" in schema or "format" in schema) and len({*said} - {"type"}) > 1:
        raise InvalidInputError(f"{where}: of pattern, format and lengths one is held; keep one")
    if "format" in schema and schema["format"] not in FORMATS:
        raise InvalidInputError(f"{where}: the format {str(schema['format'])[:80]!r} is not one of {sorted(FORMATS)}")
    if isinstance(schema.get("required"), list) and (missing := _undeclared(schema)):
        raise InvalidInputError(f"{where}: required names {missing[0][:80]!r}, which is none of its properties: add it")
    if types == ("array",) and not {"items", "prefixItems"} & {*said} and len(said) > 1:
        raise InvalidInputError(f"{where}: an array with {said[-1]} needs items, {{}} for any")


def _check_only(where: str, said: list[str], allowed: set[str], place: str) -> None:
    for name in said:
        if name not in allowed:
            known = ", ".join(sorted(allowed))
            raise InvalidInputError(f"{where}: the keyword {name[:80]!r} is not held {place}; held are {known}")


def _types(where: str, schema: Mapping[str, Any]) -> tuple[str, ...]:
    said = schema["type"]
    types = tuple(said) if isinstance(said, list) else (said,)
    if not types or not all(isinstance(kind, str) and kind in OF_TYPE for kind in types):
        raise InvalidInputError(f"{where}: the type {str(said)[:80]!r} is not one of {', '.join(OF_TYPE)}")
    return types


def _check_values(where: str, schema: Mapping[str, Any], types: tuple[str, ...]) -> None:
    """Of `const` and `enum`, beside which the library ignores the type."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    for value in values if isinstance(values, list) else ():
        if not any(_is_of(value, kind) for kind in types):
            raise InvalidInputError(f"{where}: {str(value)[:80]!r} is not of type {' or '.join(types)}")


def _is_of(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or value == int(value))
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[kind])


def _undeclared(schema: Mapping[str, Any]) -> list[str]:
    properties = schema.get("properties", {})
    return [str(name) for name in schema["required"] if not isinstance(name, str) or name not in properties]


def _inner(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas inside one, with where they are."""
    for name in ("properties", *DEFINITIONS):
        inner = schema.get(name, {})
        if not isinstance(inner, dict):
            raise InvalidInputError(f"{where}.{name} must be an object, got {str(inner)[:80]!r}")
        yield from ((f"{where}.{name}.{key[:80]}", each) for key, each in inner.items())
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(name, [])
        if not isinstance(inner, list):
            raise InvalidInputError(f"{where}.{name} must be a list, got {str(inner)[:80]!r}")
        yield from ((f"{where}.{name}.{number}", each) for number, each in enumerate(inner))
    yield from ((f"{where}.{name}", schema[name]) for name in ("items", "additionalProperties") if name in schema)
