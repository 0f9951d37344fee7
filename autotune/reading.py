"""Reading YAML that was written for another program: nothing is run, and whatever is wrong with it is a ``ValueError``."""

from __future__ import annotations

from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Makes what JSON has: a date stays text; bytes, sets and what holds itself are refused."""

    def __init__(self, content: str | bytes) -> None:
        super().__init__(content)
        self.deep_construct = True  # what is in a list or mapping is made before it

    def text_of_date(self, node: Any) -> str:
        self.construct_yaml_timestamp(node)  # raises for what is no date
        return str(node.value)

    def refuse(self, node: Any) -> None:
        self.construct_undefined(node)


_Loader.add_constructor(f"{_TAG}timestamp", _Loader.text_of_date)
for _kind in ("binary", "set"):
    _Loader.add_constructor(f"{_TAG}{_kind}", _Loader.refuse)


def plain_yaml(content: str | bytes) -> Any:
    """Numbers, text, truth values, None, lists and mappings, as YAML 1.1 has them. Raises ``ValueError``, one line, for anything
    else: PyYAML has an exception of its own for what is no YAML, and any for a tag whose text does not suit it."""
    try:
        return yaml.load(content, Loader=_Loader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
