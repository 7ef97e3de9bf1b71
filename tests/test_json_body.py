from __future__ import annotations

from typing import Annotated, Any

import orjson
import pytest
from annotated_types import Len
from pydantic import Field
from sensorium.server.errors import ApiError
from sensorium.server.json_body import ONE_FAULT, Body, body_schema, parse


class Item(Body):
    kind: str
    size: float = 1.0


class Example(Body):
    model: str
    items: Annotated[list[Item], Len(0, 3), ONE_FAULT] = Field(default_factory=list)
    either: str | Annotated[list[int], ONE_FAULT] | Item | None = None
    stream: bool = False


def fault(body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(Example, orjson.dumps(body))
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model"),
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"model": "m", "stream": 1}, "stream"),
        ({"model": "m", "items": {}}, "items"),
        ({"model": "m", "items": [{"kind": "a"}, {"kind": 3}]}, "items[1].kind"),
        ({"model": "m", "items": [{}]}, "items[0].kind"),
        ({"model": "m", "items": [{"kind": "a", "size": "1"}]}, "items[0].size"),
        ({"model": "m", "items": [{"kind": "a"}] * 4}, "items"),
        ({"model": "m", "either": 3}, "either"),
        ({"model": "m", "either": {"kind": 3}}, "either"),
    ],
)
def test_faults_name_their_place(body: Any, param: str) -> None:
    error = fault(body)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")


def test_missing_has_a_code_of_its_own() -> None:
    assert fault({}).code == "missing_required_parameter"
    assert fault({"model": 3}).code == "invalid_value"


def test_long_lists_of_wrong_items_are_refused_at_the_first() -> None:
    error = fault({"model": "m", "either": [1, "x"] * 100_000})
    assert len(error.message) < 1000


def test_values_are_not_repeated() -> None:
    assert "secret" not in fault({"model": ["secret"]}).message


def test_numbers_are_not_bent() -> None:
    body = parse(Example, b'{"model": "m", "items": [{"kind": "a", "size": 2}]}')
    assert body.items[0].size == 2.0
    assert fault({"model": "m", "items": [{"kind": "a", "size": True}]}).param == "items[0].size"


@pytest.mark.parametrize(
    "text", [b"", b"[1]", b"nan", b'{"model": "\xff"}', b"{" * 3000, b'{"model": 1e999}']
)
def test_what_is_no_json_object(text: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(Example, text)
    assert caught.value.status == 400


def test_schema_points_into_the_document() -> None:
    path = "/v1/x~y"
    entry = body_schema(Example, path)
    document = {"paths": {path: {"post": entry["openapi_extra"]}}}
    schema = entry["openapi_extra"]["requestBody"]["content"]["application/json"]["schema"]
    here: Any = document
    for step in schema["properties"]["items"]["items"]["$ref"].removeprefix("#/").split("/"):
        here = here[step.replace("~1", "/").replace("~0", "~")]
    assert here["properties"].keys() == {"kind", "size"}
    assert "text/event-stream" in entry["responses"][200]["content"]
