"""The keywords of JSON schemas that the grammar compiler is asked for, and readers of their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .structured_text import MAX_COUNT, GrammarError

ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"),
        *("examples", "deprecated", "readOnly", "writeOnly", "nullable", "discriminator"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    )
)
STRING = frozenset(("minLength", "maxLength", "pattern", "format"))
NUMBER = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
ARRAY = frozenset(
    (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"),
        *("uniqueItems", "contains", "minContains", "maxContains"),
    )
)
OBJECT = frozenset(
    (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
    )
)
COMBINERS = ("anyOf", "oneOf", "allOf")
KNOWN = STRING | NUMBER | ARRAY | OBJECT | {*COMBINERS, "$ref", "type", "enum", "const"}
KEYWORDS_OF_TYPE = {"string": STRING, "number": NUMBER, "array": ARRAY, "object": OBJECT}
TYPES = ("null", "boolean", "string", "integer", "number", "array", "object")
FORMATS = frozenset(
    (
        *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"),
        *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
    )
)
UNBOUNDED = 2**31  # no text has so many characters or items


def allowed_types(rules: Mapping[str, Any]) -> list[str]:
    """The types that are allowed, or without `type` those that the keywords speak of: none means any value."""
    if "type" not in rules:
        return [kind for kind, keywords in KEYWORDS_OF_TYPE.items() if keywords & rules.keys()]
    kinds = rules["type"] if isinstance(rules["type"], list) else [rules["type"]]
    if not kinds or not all(isinstance(kind, str) and kind in TYPES for kind in kinds):
        raise GrammarError("type must be one or several of " + ", ".join(TYPES))
    return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]


def is_a(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or value == int(value))
    python_types = {
        "null": type(None),
        "boolean": bool,
        "string": str,
        "array": list | tuple,
        "object": Mapping,
    }
    return isinstance(value, python_types[kind])


def possible_types(schema: Mapping[str, Any]) -> set[str]:
    if "enum" in schema or "const" in schema:
        return {kind for kind in TYPES for value in listed_values(schema) if is_a(value, kind)}
    kinds = set(allowed_types(schema)) if "type" in schema else set(TYPES)
    return kinds | {"integer"} if "number" in kinds else kinds


def listed_values(schema: Mapping[str, Any]) -> list[Any]:
    values = schema.get("enum", [schema.get("const")])
    return values if isinstance(values, list) else []


def mapping(rules: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = rules.get(name, {})
    if not isinstance(value, Mapping):
        raise GrammarError(f"{name} must be an object")
    return value


def list_of_names(rules: Mapping[str, Any], name: str) -> list[str]:
    value = rules.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise GrammarError(f"{name} must be a list of names")
    return value


def bounds(rules: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
    """A lower and an upper bound of a number of things; an upper bound that no text reaches is None."""
    for name in (least, most):
        value = rules.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            raise GrammarError(f"{name} must be a whole number of at least 0")
    if rules.get(least, 0) > MAX_COUNT:
        raise GrammarError(f"{least} is larger than {MAX_COUNT}")
    upper = rules.get(most, UNBOUNDED)
    return int(rules.get(least, 0)), int(upper) if upper < UNBOUNDED else None


def is_finite(schema: Any, grounded: set[str]) -> bool:
    """Whether a rewritten schema has a value that ends, if those of the definitions in `grounded` do."""
    if schema is False:
        return False
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in grounded
    if "anyOf" in schema:
        return any(is_finite(branch, grounded) for branch in schema["anyOf"])
    needed = [schema["properties"][name] for name in schema.get("required", ())]
    if schema.get("minItems"):
        prefix = schema.get("prefixItems", [])
        needed += prefix[: schema["minItems"]]
        needed += [schema["items"]] if schema["minItems"] > len(prefix) else []
    return all(is_finite(part, grounded) for part in needed)
