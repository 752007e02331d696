"""Every view is a link: widgets whose value stands in the address, under the widget's own key.

What must always hold: a value that differs from its default is in the address and nothing else is, a link opens the
view it was copied from, and a value that makes no sense is taken for the default.  Values are written as they are, not
in the language of the page, so that a link means the same to everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import streamlit as st

T = TypeVar("T")
_UNSEEN: Final = "\0"


def choice(
    label: str, options: Sequence[str], key: str, words: Mapping[str, str] | None = None, default: str | None = None
) -> str:
    """One of ``options``, side by side.  words: how each is shown.  default: the first where not given."""
    default = options[0] if default is None else default
    _adopt(key, lambda said: said if said in options else None, default)
    found = st.segmented_control(label, options, key=key, format_func=lambda option: (words or {}).get(option, option))
    value = found if found is not None else default  # a second click on the chosen one takes it away
    return _write(key, value, default)


def picked(label: str, options: Sequence[str], key: str, words: Mapping[str, str] | None = None) -> str:
    """One of many ``options`` from a list; the first is the default."""
    _adopt(key, lambda said: said if said in options else None, options[0])
    if st.session_state.get(key) not in options:
        st.session_state[key] = options[0]
    value = st.selectbox(label, options, key=key, format_func=lambda option: (words or {}).get(option, option))
    return _write(key, value, options[0])


def number(
    label: str, key: str, default: float, low: float, high: float, step: float, shown: str | None = None
) -> float:
    """A number within bounds.  shown: how it is printed, like ``%.3f``."""
    default = min(high, max(low, default))
    _adopt(key, lambda said: _within(said, low, high), default)
    st.session_state[key] = min(high, max(low, float(st.session_state.get(key, default))))
    value = float(st.number_input(label, min_value=low, max_value=high, step=step, key=key, format=shown))
    return _write(key, value, default)


def whole(label: str, key: str, default: int, low: int, high: int) -> int:
    """A whole number within bounds."""
    default = min(high, max(low, default))

    def parse(said: str) -> int | None:
        found = _within(said, low, high)
        return None if found is None else int(found)

    _adopt(key, parse, default)
    st.session_state[key] = min(high, max(low, int(st.session_state.get(key, default))))
    value = int(st.number_input(label, min_value=low, max_value=high, step=1, key=key))
    return _write(key, value, default)


def _within(said: str, low: float, high: float) -> float | None:
    try:
        value = float(said)
    except ValueError:
        return None
    return value if low <= value <= high else None


def _adopt(key: str, parse: Callable[[str], T | None], default: T) -> None:
    """Take the value from the address when it says another than we last wrote there: somebody followed a link."""
    said = st.query_params.get(key)
    if key in st.session_state and said == st.session_state.get(f"address.{key}", _UNSEEN):
        return
    value = None if said is None else parse(said)
    st.session_state[key] = default if value is None else value


def _write(key: str, value: T, default: T) -> T:
    said = None if value == default else f"{value:.10g}" if isinstance(value, float) else str(value)
    if said is None:
        if key in st.query_params:
            del st.query_params[key]
    elif st.query_params.get(key) != said:
        st.query_params[key] = said
    st.session_state[f"address.{key}"] = said
    return value
