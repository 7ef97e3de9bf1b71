"""JSON schemas reduced to what the grammar compiler enforces exactly.

xgrammar silently ignores what it cannot express (lengths beside a pattern, siblings of $ref, uniqueItems, not,
all but one branch of allOf, …). `normalize_schema` rewrites a schema (2020-12, and the tuple `items` of older
drafts) so that every text of the resulting grammar is valid under the original: sometimes narrower (objects that
list properties are closed unless `additionalProperties` says otherwise, properties come in the order listed),
never wider. What cannot be kept is an error in strict mode and is left out otherwise.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from .structured_keywords import (
    ANNOTATIONS,
    COMBINERS,
    FORMATS,
    KNOWN,
    NUMBER,
    allowed_types,
    bounds,
    is_a,
    is_finite,
    list_of_names,
    listed_values,
    mapping,
    possible_types,
)
from .structured_text import MAX_NODES, GrammarError, normalize_regex, parse_document

MAX_SCHEMA_DEPTH = 64
MAX_EXCLUSIVE_BRANCHES = 64  # of oneOf: each is compared with each
MAX_MULTIPLE = 1_000  # multipleOf is a table of remainders in the grammar
MAX_LISTED = 1_000
MAX_INTEGER = 2**62  # bounds beyond are narrowed to it: the grammar counts in 64 bits

NAME_KEYWORDS = frozenset(("type", "pattern", "format", "minLength", "maxLength", "enum"))


def normalize_schema(document: object, *, strict: bool) -> dict[str, Any]:
    """A schema (JSON text or value) → an equivalent or narrower one that xgrammar enforces in full.

    Raises GrammarError: malformed, impossible, too large, and in strict mode whatever would be ignored.
    """
    schema = parse_document(document, "the schema")
    if not isinstance(schema, Mapping | bool):
        raise GrammarError("the schema must be an object")
    return _Normalizer(schema, strict).run()


class _Normalizer:
    """Rewrites the schemas that can be reached from the root, each $ref target once.

    Its methods return False for a schema that no value satisfies.
    """

    def __init__(self, root: Any, strict: bool) -> None:
        self.root = root
        self.strict = strict
        self.nodes = 0
        self.names = {"#": "r0"}  # JSON pointer → name of the rewritten definition
        self.pending = ["#"]

    def run(self) -> dict[str, Any]:
        definitions: dict[str, Any] = {}
        while self.pending:
            pointer = self.pending.pop()
            definitions[self.names[pointer]] = self.schema(self.resolve(pointer), 0)
        grounded: set[str] = set()
        while more := {
            name for name in definitions.keys() - grounded if is_finite(definitions[name], grounded)
        }:
            grounded |= more
        if "r0" not in grounded:
            raise GrammarError("no value can satisfy the schema")
        return {"$ref": "#/$defs/r0", "$defs": definitions}

    def unsupported(self, what: str) -> None:
        if self.strict:
            raise GrammarError(f"the schema uses {what}, which is not supported")

    def resolve(self, pointer: str) -> Any:
        """The value at a pointer such as #/$defs/name."""
        value = self.root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise GrammarError(f"the schema has no {pointer[:100]}")
        return value

    def schema(self, schema: Any, depth: int) -> Any:
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, Mapping):
            raise GrammarError("a schema must be an object or a boolean")
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise GrammarError(f"the schema and its references make more than {MAX_NODES} schemas")
        if depth > MAX_SCHEMA_DEPTH:
            raise GrammarError("the schema is nested too deeply")
        rules = {
            name: rule
            for name, rule in schema.items()
            if name not in ANNOTATIONS and not name.startswith("x-")
        }
        for name in [name for name in rules if name not in KNOWN]:
            self.unsupported(repr(name[:40]))
            del rules[name]
        if "$ref" in rules:
            return self.reference(rules)
        if "enum" in rules or "const" in rules:
            return self.values(rules)
        if any(name in rules for name in COMBINERS):
            return self.combined(rules, depth)
        return _any_of([self.of_type(kind, rules, depth) for kind in allowed_types(rules)] or [{}])

    def reference(self, rules: Mapping[str, Any]) -> Any:
        if len(rules) > 1:
            self.unsupported("keywords beside $ref")
        pointer = rules["$ref"]
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise GrammarError("only references within the schema (#/…) are supported")
        if pointer not in self.names:
            self.resolve(pointer)
            self.names[pointer] = f"r{len(self.names)}"
            self.pending.append(pointer)
        return {"$ref": f"#/$defs/{self.names[pointer]}"}

    def values(self, rules: Mapping[str, Any]) -> Any:
        if rules.keys() - {"enum", "const", "type"} or rules.keys() >= {"enum", "const"}:
            self.unsupported("keywords beside enum or const")
        values = rules["enum"] if "enum" in rules else [rules["const"]]
        if not isinstance(values, list) or not values:
            raise GrammarError("enum must be a list of values")
        if "type" in rules:
            kinds = allowed_types(rules)
            values = [value for value in values if any(is_a(value, kind) for kind in kinds)]
        return {"enum": values} if values else False

    def combined(self, rules: Mapping[str, Any], depth: int) -> Any:
        combiner = next(name for name in COMBINERS if name in rules)
        branches = rules[combiner]
        if len(rules) > 1:
            self.unsupported(f"keywords beside {combiner}")
        if not isinstance(branches, list) or not branches:
            raise GrammarError(f"{combiner} must be a list of schemas")
        if combiner == "allOf" and len(branches) > 1:
            self.unsupported("allOf of several schemas")
            branches = branches[:1]
        rewritten = [self.schema(branch, depth + 1) for branch in branches]
        if combiner == "oneOf" and (
            len(branches) > MAX_EXCLUSIVE_BRANCHES
            or not all(self.disjoint(left, right) for left, right in itertools.combinations(branches, 2))
        ):
            self.unsupported("oneOf of schemas that may hold for one value")
        return _any_of(rewritten)

    def disjoint(self, left: Any, right: Any, depth: int = 0) -> bool:
        """Whether it is plain that no value satisfies both."""
        left, right = self.dereference(left), self.dereference(right)
        if left is False or right is False:
            return True
        if not isinstance(left, Mapping) or not isinstance(right, Mapping) or depth > 1:
            return False
        mine, theirs = possible_types(left), possible_types(right)
        if not mine & theirs:
            return True
        if all("enum" in schema or "const" in schema for schema in (left, right)):
            listed = [listed_values(left), listed_values(right)]
            simple = all(isinstance(value, str | int | None) for values in listed for value in values)
            texts = [{json.dumps(value) for value in values} for values in listed]
            return simple and not texts[0] & texts[1]
        if depth or mine & theirs != {"object"}:
            return False
        properties = [mapping(left, "properties"), mapping(right, "properties")]
        shared = set(list_of_names(left, "required")) & set(list_of_names(right, "required"))
        return any(
            self.disjoint(properties[0].get(name), properties[1].get(name), depth + 1) for name in shared
        )

    def dereference(self, schema: Any) -> Any:
        for _ in range(8):
            if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
                break
            schema = self.resolve(schema["$ref"])
        return schema

    def of_type(self, kind: str, rules: Mapping[str, Any], depth: int) -> Any:
        if kind == "string":
            return self.string(rules)
        if kind in ("integer", "number"):
            return self.number(kind, rules)
        if kind == "array":
            return self.array(rules, depth)
        if kind == "object":
            return self.object(rules, depth)
        return {"type": kind}

    def string(self, rules: Mapping[str, Any]) -> Any:
        least, most = bounds(rules, "minLength", "maxLength")
        if most is not None and least > most:
            return False
        out: dict[str, Any] = {"type": "string"}
        if "format" in rules and rules["format"] not in FORMATS:
            self.unsupported(f"the format {str(rules['format'])[:40]!r}")
        elif "format" in rules:
            out["format"] = rules["format"]
        if "pattern" in rules:
            out = {"type": "string", "pattern": normalize_regex(rules["pattern"], in_json=True)}
        if len(out) == 1:
            if least:
                out["minLength"] = least
            if most is not None:
                out["maxLength"] = most
        elif least or most is not None or {"format", "pattern"} <= rules.keys():
            self.unsupported("two of pattern, format and length for one string")
        return out

    def number(self, kind: str, rules: Mapping[str, Any]) -> Any:
        for name in NUMBER & rules.keys():
            if isinstance(rules[name], bool) or not isinstance(rules[name], int | float):
                raise GrammarError(f"{name} must be a number")
        multiple = rules.get("multipleOf", 1)
        if multiple <= 0:
            raise GrammarError("multipleOf must be greater than 0")
        if multiple != int(multiple) or multiple > MAX_MULTIPLE:
            self.unsupported(f"multipleOf other than whole numbers up to {MAX_MULTIPLE}")
            multiple = 1
        elif "multipleOf" in rules:
            kind = "integer"
        if kind == "number":
            return {
                "type": kind,
                **{name: rules[name] for name in sorted(NUMBER & rules.keys() - {"multipleOf"})},
            }
        lows = [math.ceil(rules["minimum"])] if "minimum" in rules else []
        lows += [math.floor(rules["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in rules else []
        highs = [math.floor(rules["maximum"])] if "maximum" in rules else []
        highs += [math.ceil(rules["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in rules else []
        low, high = max(lows, default=None), min(highs, default=None)
        if (low is not None and low > MAX_INTEGER) or (high is not None and high < -MAX_INTEGER):
            return False
        out: dict[str, Any] = {"type": "integer"}
        if low is not None:
            out["minimum"] = low = max(low, -MAX_INTEGER)
        if high is not None:
            out["maximum"] = high = min(high, MAX_INTEGER)
        if low is not None and high is not None and low > high:
            return False
        return out if multiple == 1 else self.multiples(int(multiple), low, high)

    def multiples(self, multiple: int, low: int | None, high: int | None) -> Any:
        """xgrammar has no range of multiples: a closed one is listed."""
        if low is None and high is None:
            return {"type": "integer", "multipleOf": multiple}
        if low is None or high is None or (high - low) // multiple >= MAX_LISTED:
            self.unsupported(f"multipleOf with bounds, but for ranges of at most {MAX_LISTED} values")
            return {"type": "integer", "multipleOf": multiple}
        values = list(range(-(-low // multiple) * multiple, high + 1, multiple))
        return {"enum": values} if values else False

    def array(self, rules: Mapping[str, Any], depth: int) -> Any:
        least, most = bounds(rules, "minItems", "maxItems")
        prefix, items = rules.get("prefixItems", []), rules.get("items", True)
        if isinstance(items, list):  # drafts before 2020-12
            prefix, items = items, rules.get("additionalItems", True)
        elif rules.get("unevaluatedItems", True) is not True:
            if "items" not in rules and rules["unevaluatedItems"] is False:
                items = False
            else:
                self.unsupported("unevaluatedItems")
        if not isinstance(prefix, list):
            raise GrammarError("prefixItems must be a list of schemas")
        if "contains" in rules:
            self.unsupported("contains")
        if rules.get("uniqueItems", False) is not False and (most is None or most > 1):
            self.unsupported("uniqueItems")
        first = [self.schema(schema, depth + 1) for schema in prefix]
        rest = self.schema(items, depth + 1)
        first = list(itertools.takewhile(lambda schema: schema is not False, first))
        if len(first) < len(prefix):
            rest = False
        if most is not None and most <= len(first):
            first, rest = first[:most], False
        if rest is False:
            most = None
            if least > len(first):
                return False
        if most is not None and least > most:
            return False
        out: dict[str, Any] = {"type": "array", "items": rest, "minItems": least}
        if first:
            out["prefixItems"] = first
        if most is not None:
            out["maxItems"] = most
        return out

    def object(self, rules: Mapping[str, Any], depth: int) -> Any:
        least, most = bounds(rules, "minProperties", "maxProperties")
        for name in ("dependentRequired", "dependentSchemas", "dependencies"):
            if name in rules:
                self.unsupported(name)
        properties = {
            name: self.schema(schema, depth + 1) for name, schema in mapping(rules, "properties").items()
        }
        required = list(dict.fromkeys(list_of_names(rules, "required")))
        patterns = mapping(rules, "patternProperties")
        extra = rules.get("additionalProperties")
        if rules.get("unevaluatedProperties", True) is not True:
            if extra is not None or patterns or rules["unevaluatedProperties"] is not False:
                self.unsupported("unevaluatedProperties beside other rules for names")
            extra = False
        possible = sum(schema is not False for schema in properties.values())
        if extra is None and properties:
            extra = len({*properties, *required}) < least
        others = self.schema(True if extra is None else extra, depth + 1)
        closed = others is False or possible < len(properties)
        for name in required:
            schema = properties.setdefault(name, False if closed else others)
            if schema is False:
                return False
        properties = {name: schema for name, schema in properties.items() if schema is not False}
        out: dict[str, Any] = {"type": "object"}
        if patterns and (properties or "propertyNames" in rules or len(patterns) > 1):
            self.unsupported("patternProperties beside other rules for names")
        elif patterns:
            ((pattern, schema),) = patterns.items()
            out["patternProperties"] = {
                normalize_regex(pattern, in_json=True): self.schema(schema, depth + 1)
            }
            closed = False
            if False in out["patternProperties"].values():
                out, closed = {"type": "object"}, True
        if "propertyNames" in rules and rules["propertyNames"] is not True and not closed:
            names = self.property_names(rules["propertyNames"], depth)
            if properties:
                self.unsupported("propertyNames beside other rules for names")
            elif names is False:
                closed = True
            elif names is not None:
                out["propertyNames"] = names
        if closed:
            if least > len(properties):
                return False
            most = None if most is not None and most >= len(properties) else most
        if least > max(1, len(required)) and not closed:
            # A text may repeat a name that the schema does not list.
            self.unsupported("minProperties above 1 for names that are not listed")
            least = len(required)
        if most is not None and max(least, len(required)) > most:
            return False
        if "patternProperties" not in out:
            out |= {"properties": properties, "additionalProperties": False if closed else others}
        if required:
            out["required"] = required
        if least > len(required):
            out["minProperties"] = least
        if most is not None:
            out["maxProperties"] = most
        return out

    def property_names(self, schema: Any, depth: int) -> Any:
        """Rules for names: a schema of strings, False if there can be no name, None if any will do."""
        schema = self.dereference(schema)
        if isinstance(schema, Mapping) and "type" not in schema:
            schema = {"type": "string", **schema}
        names = self.schema(schema, depth + 1)
        if names is False or names == {"type": "string"}:
            return None if names else False
        if not names or not names.keys() <= NAME_KEYWORDS or names.get("type", "string") != "string":
            self.unsupported("propertyNames other than a pattern, format, length or list")
            return None
        if any(json.dumps(name, ensure_ascii=False) != f'"{name}"' for name in names.get("enum", ())):
            raise GrammarError(
                "a property name with quotes, backslashes or control characters is not supported"
            )
        return names


def _any_of(schemas: Sequence[Any]) -> Any:
    possible = [schema for schema in schemas if schema is not False]
    if len(possible) == 1:
        return possible[0]
    return {"anyOf": possible} if possible else False
