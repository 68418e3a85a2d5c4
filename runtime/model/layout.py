"""Where the attention layers of a model keep their tokens, however the model is run."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet.backends.base import AttentionArgs, KVGroup, LayerKV

from .probe import AttentionCall


class AttentionLayout:
    """The KV groups of a model, and the place and settings of each attention call.

    Attributes:
        windows: the window of every call, in order; None for full attention.
        places: (KV group, layer whose keys are read) of every call. A layer's number is its place in the forward pass.
        args: settings of every call; sinks, which may be given anew at each call, are left out.
    """

    def __init__(self, calls: Sequence[AttentionCall], max_len: int) -> None:
        self._calls = tuple(calls)
        self.windows = tuple(None if c.window is None or c.window >= max_len else c.window for c in calls)
        self._group_windows = sorted(set(self.windows), key=lambda w: (w is not None, w or 0))
        self.places = [(self._group_windows.index(self.windows[c.source]), c.source) for c in calls]
        self.args = [AttentionArgs(c.scale, w, c.softcap) for c, w in zip(calls, self.windows, strict=True)]

    @property
    def num_groups(self) -> int:
        """Number of KV groups."""
        return len(self._group_windows)

    def kv_groups(self, block_size: int, kv_dtype: str) -> tuple[KVGroup, ...]:
        """The layers grouped by window, full attention first; layers that share keys are kept once."""
        groups = []
        for number, window in enumerate(self._group_windows):
            layers = tuple(
                LayerKV(i, call.num_kv_heads, call.head_dim, call.value_head_dim)
                for i, call in enumerate(self._calls)
                if call.source == i and self.places[i][0] == number
            )
            groups.append(KVGroup(layers, window, kv_dtype, block_size))
        return tuple(groups)
