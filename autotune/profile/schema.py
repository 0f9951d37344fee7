"""The JSON schema of a profile, for editors and other programs: made from the models, and kept beside the profiles."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from autotune.profile.versions import SCHEMA_VERSION

SCHEMA_FILE = "profile.schema.json"


class _Plain(GenerateJsonSchema):
    """Without a title for every field that only repeats its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@functools.cache
def profile_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12. What it accepts is a profile by form; loading also checks what fields say of each other."""
    from autotune.profile.document import Profile

    return schema_of(Profile, f"autotune profile, schema version {SCHEMA_VERSION}")


def schema_of(model: type[BaseModel], title: str) -> dict[str, Any]:
    """Of any file made of parts."""
    made = model.model_json_schema(schema_generator=_Plain)
    made["title"] = title
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def schema_text(schema: dict[str, Any] | None = None) -> str:
    """The schema (of a language model's profile, unless another is given) as the file holds it."""
    return json.dumps(schema or profile_schema(), indent=1, ensure_ascii=False) + "\n"


def profiles_folder() -> Path:
    """Where the profiles that come with the package are: in the wheel, or in the repository of an editable install."""
    here = Path(__file__).resolve().parents[1]
    folder = here / "_profiles"
    if not folder.is_dir() and (here.parent / "pyproject.toml").is_file():
        folder = here.parent / "profiles"
    return folder


def editor_line(path: Path) -> str:
    """The comment by which editors with the YAML language server find the schema of the profile at ``path``.

    Among the profiles that come with the package it is a relative path, which holds wherever they are; anywhere else it is
    the path of the installed schema, which holds on this machine. Empty when no schema is installed.
    """
    schema = profiles_folder() / SCHEMA_FILE
    if not schema.is_file():
        return ""
    folder = Path(os.path.realpath(path)).parent
    near = folder.is_relative_to(schema.parent)
    place = Path(os.path.relpath(schema, folder)).as_posix() if near else str(schema)
    return f"# yaml-language-server: $schema={place}\n"


__all__ = ["SCHEMA_FILE", "editor_line", "profile_schema", "profiles_folder", "schema_of", "schema_text"]
