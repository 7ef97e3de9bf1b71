"""Upload intake: a multipart/form-data body read as it arrives, under limits on every part of it.

python-multipart's streaming parser does the parsing; what is kept, and how much of it, is decided here.
"""

from __future__ import annotations

import asyncio
import codecs
import io
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from . import errors
from .errors import ApiError, ClientGone
from .limits import Holding

MAX_PARTS = 512
MAX_TEXT_BYTES = 1024 * 1024  # of all text fields together
TEXT_CHARSETS = frozenset({"utf-8", "ascii", "iso8859-1", "cp1252", "utf-16"})  # Python's names
MAX_OVERHEAD_BYTES = 2 * MAX_TEXT_BYTES  # of the body beside the file: text, part headers, boundaries


@dataclass
class Form:
    """What a client sent. fields: (name, value) in order of arrival. file: the upload, or None."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    file: bytes | None = None


async def read_form(request: Request, max_file_bytes: int, stall_seconds: float, held: Holding) -> Form:
    """Reads the request's body; `held` grows with the bytes in memory and stays held on return.

    Raises ApiError: 400 not multipart or malformed, 408 nothing arrived for `stall_seconds`, 413 too large,
    429 too many uploads in flight. Raises ClientGone when the connection closes.
    """
    reader = _FormReader(_boundary(request.headers.get("content-type")), max_file_bytes)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal():
        if int(announced) > max_file_bytes + MAX_OVERHEAD_BYTES:
            raise errors.content_too_large(max_file_bytes, int(announced))
        _grow(held, int(announced))
    received = 0
    more = True
    while more:
        try:
            async with asyncio.timeout(stall_seconds):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(408, "The upload stalled: no data arrived for too long.") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk, more = message.get("body", b""), message.get("more_body", False)
        received += len(chunk)
        if received > max_file_bytes + MAX_OVERHEAD_BYTES:
            raise errors.content_too_large(max_file_bytes, received)
        _grow(held, received)
        reader.write(chunk)
    return reader.finish()


def _grow(held: Holding, amount: int) -> None:
    if not held.try_grow_to(amount):
        raise errors.overloaded("too many uploads are in flight")


def _boundary(content_type: str | None) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise errors.invalid(None, "The request body must be multipart/form-data.")
    if not options.get(b"boundary"):
        raise errors.invalid(None, "The multipart/form-data content type has no boundary.")
    return options[b"boundary"]


class _FormReader:
    """Collects the parts that the parser announces. The part named `file` is the upload, whatever its file
    name or type; a part of any other name is text, also when a client gives it a file name or a type."""

    def __init__(self, boundary: bytes, max_file_bytes: int) -> None:
        self._form = Form()
        self._max_file_bytes = max_file_bytes
        self._parts = 0
        self._text_bytes = 0
        self._file: io.BytesIO | None = None
        self._ended = False
        self._name = ""
        self._content_type = ""
        self._text = bytearray()
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )
        except FormParserError:
            raise _malformed() from None

    def write(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise _malformed() from None

    def finish(self) -> Form:
        if not self._ended:
            raise errors.invalid(None, "The multipart body ends before its closing boundary.")
        if self._file is not None:
            self._form.file = self._file.getvalue()
        return self._form

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise errors.invalid(None, f"The form has more than {MAX_PARTS} parts.")
        self._name, self._content_type, self._disposition = "", "", b""
        self._text = bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        name = self._header_name.lower()
        if name == b"content-disposition":
            self._disposition = self._header_value
        elif name == b"content-type":
            self._content_type = self._header_value.decode("latin-1")
        self._header_name, self._header_value = b"", b""

    def _headers_finished(self) -> None:
        name = parse_options_header(self._disposition)[1].get(b"name")
        if name is None:
            raise errors.invalid(None, "A part of the form has no name.")
        self._name = name.decode("utf-8", "replace")
        if self._name == "file":
            if self._file is not None:
                raise errors.invalid("file", "Send one file only.")
            self._file = io.BytesIO()

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            assert self._file is not None
            self._file.write(memoryview(data)[start:end])
            if self._file.tell() > self._max_file_bytes:
                raise errors.content_too_large(self._max_file_bytes, self._file.tell())
            return
        self._text_bytes += end - start
        if self._text_bytes > MAX_TEXT_BYTES:
            raise errors.invalid(
                self._name[:100], f"The form's text fields exceed {MAX_TEXT_BYTES} bytes together."
            )
        self._text += data[start:end]

    def _part_end(self) -> None:
        if self._name != "file":
            self._form.fields.append((self._name, self._decoded()))

    def _decoded(self) -> str:
        charset = parse_options_header(self._content_type)[1].get(b"charset", b"utf-8").decode("latin-1")
        try:
            if codecs.lookup(charset).name not in TEXT_CHARSETS:
                raise LookupError(charset)
            return self._text.decode(charset)
        except (ValueError, LookupError):  # a name of a character set may hold anything, such as a NUL
            raise errors.invalid(
                self._name[:100], "The field is not valid text in its character set."
            ) from None

    def _end(self) -> None:
        self._ended = True


def _malformed() -> ApiError:
    return errors.invalid(None, "The multipart body is malformed.")
