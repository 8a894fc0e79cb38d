"""What the headers of recordings must hold, checked when they are read.

A full disk or an edited file can leave a header that is valid JSON and still wrong. After this
check all other code may rely on the shapes, and the page says which file is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megascan.errors import ConfigError, InputError
from megascan.topology import Layout
from megascope.frames import Frame
from megascope.request import PLACES, REDUCTIONS, is_whole

MOST_RANKS = 1 << 20
_SHARES = ("whole", "features", "gated", "tokens")


def check_frame(frame: Frame) -> None:
    """Raise InputError for a frame that no recorder has written."""
    header = frame.header
    match header.get("kind"):
        case "run":
            _check_run(header)
        case "data":
            _check_data(header)
            for number, item in enumerate(header["items"]):
                _check_item(item, frame.arrays.get(str(number)))
        case kind:
            raise InputError(f"a frame is of no known kind ({str(kind)[:20]!r})")
    if "weights" in header:
        _need(frame.arrays.get("weights") is not None, "weights")
        _need(frame.arrays["weights"].shape == (len(header["weights"]), 3), "weights")


def _check_run(header: Mapping[str, Any]) -> None:
    _need_all(header, {"rank": _is_natural, "first_iteration": _is_natural, "layout": _is_object,
                       "model": _is_object, "is_continued": _is_switch})  # fmt: skip
    sizes = {name: size for name, size in header["layout"].items() if name != "order"}
    _need(all(map(_is_natural, sizes.values())), "layout")
    _need(isinstance(header["layout"].get("order", ""), str), "layout")
    try:
        layout = Layout(**header["layout"])
    except (ConfigError, TypeError) as error:
        raise InputError(f"a frame's layout is damaged ({error})") from error
    _need(layout.world_size <= MOST_RANKS and layout.ep <= MOST_RANKS, "layout")
    _need(header["rank"] < layout.world_size, "rank")


def _check_data(header: Mapping[str, Any]) -> None:
    _need_all(header, {"iteration": _is_natural, "per_token": _is_switch, "items": _is_list})
    if "broken" in header:
        _need(_is_object(header["broken"]), "broken")
        _need_all(header["broken"], {"layer": _is_natural, "microbatch": _is_natural,
                                     "place": _is_word, "gradient": _is_switch})  # fmt: skip
    if "weights" in header:
        _need(_is_list(header["weights"]) and all(map(_is_word, header["weights"])), "weights")


def _check_item(item: object, array: Any) -> None:
    if not isinstance(item, dict):
        raise InputError("a frame's items are damaged")
    _need_all(item, {"gradient": _is_switch, "layers": _is_list, "microbatches": _is_list})
    for name, known in (("place", PLACES), ("reduction", REDUCTIONS), ("share", _SHARES)):
        _need(item.get(name) in known, name)
    for name in ("layers", "microbatches"):
        _need(all(map(_is_natural, item[name])) and len(set(item[name])) == len(item[name]), name)
    shape: tuple[int, ...] = () if array is None else array.shape
    counted = (len(item["layers"]), len(item["microbatches"]))
    _need(len(shape) == 5 and shape[:2] == counted, "items")
    width = item.get("width")
    _need(isinstance(width, int) and not isinstance(width, bool) and width > 0, "width")


def _need_all(record: Mapping[str, Any], parts: Mapping[str, Callable[[object], bool]]) -> None:
    for name, is_right in parts.items():
        _need(is_right(record.get(name)), name)


def _need(is_right: bool, name: str) -> None:
    if not is_right:
        raise InputError(f"a frame is damaged: its {name} makes no sense")


def _is_natural(value: object) -> bool:
    return is_whole(value) and value >= 0  # type: ignore[operator]


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_word(value: object) -> bool:
    return isinstance(value, str)
