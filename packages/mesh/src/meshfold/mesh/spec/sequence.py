"""The entry ``sequence``: how the sequence dim of activations is split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshfold.mesh.spec.entry import Entry, divisors, format_value, join_choices, meant

MODES = ("ring", "ulysses", "ring_ulysses", "megatron")
KEYS = ("mode", "size", "ulysses")


@dataclass(frozen=True, kw_only=True)
class SequenceSpec:
    """The checked entry ``sequence``.

    ``size`` is the number of ranks it adds: 1 for megatron, which reuses the axis ``tensor``. ``ulysses``
    is the size of the inner axis of ring_ulysses, whose ring has ``size // ulysses`` ranks; None for the
    others. A callable as the mode is a custom attention over the axis ``seq``.
    """

    mode: str | Callable[..., object]
    size: int = 1
    ulysses: int | None = None

    @property
    def mode_name(self) -> str:
        """The mode's name, or the callable's."""
        if isinstance(self.mode, str):
            return self.mode
        return str(getattr(self.mode, "__name__", type(self.mode).__name__))

    @property
    def axes(self) -> dict[str, int]:
        """Axis name to size, outermost first; empty for megatron."""
        if self.mode == "megatron":
            return {}
        if self.ulysses is not None:
            return {"ring": self.size // self.ulysses, "ulysses": self.ulysses}
        return {"seq": self.size}

    @classmethod
    def parse(cls, value: object) -> SequenceSpec:
        """Check a dict with the keys mode, size, ulysses. Raises SpecError."""
        entry = Entry(name="sequence", value=value)
        fields = entry.fields(KEYS, f"sequence=dict(mode='ring', size={meant(value) or 2})")
        if "mode" not in fields:
            raise entry.error("mode is missing.", f"Write mode={join_choices(repr(name) for name in MODES)}.")
        mode = _mode(entry, fields["mode"])
        if mode == "megatron":
            for key in ("size", "ulysses"):
                if key in fields:
                    ranks = meant(fields.get("size")) or 2
                    raise entry.error(
                        f"mode 'megatron' takes no {key}: it splits the sequence over the axis tensor.",
                        f"Leave {key} out, and say how many ranks by tensor=dict(mode='1d', size={ranks}).",
                    )
            return cls(mode=mode)
        if "size" not in fields:
            raise entry.error("size is missing.", "Write size=2 to split the sequence over two ranks.")
        size = entry.count("size", fields["size"], 2)
        if mode != "ring_ulysses":
            if "ulysses" in fields:
                raise entry.error(
                    f"ulysses belongs to mode 'ring_ulysses', and the mode is {format_value(mode)}.",
                    "Leave ulysses out, or write mode='ring_ulysses'.",
                )
            return cls(mode=mode, size=size)
        fits = join_choices(divisors(size)[:8])
        if "ulysses" not in fields:
            problem = "mode 'ring_ulysses' needs ulysses: size = ring × ulysses."
            raise entry.error(problem, f"Write ulysses={fits}.")
        ulysses = entry.count("ulysses", fields["ulysses"], 2)
        if size % ulysses:
            raise entry.error(f"ulysses {ulysses} does not divide size {size}.", f"Write ulysses={fits}.")
        return cls(mode=mode, size=size, ulysses=ulysses)

    def to_dict(self) -> dict[str, object]:
        """Return the entry that parses to this."""
        if self.mode == "megatron":
            return {"mode": self.mode}
        ulysses = {} if self.ulysses is None else {"ulysses": self.ulysses}
        return {"mode": self.mode, "size": self.size, **ulysses}


def _mode(entry: Entry, value: object) -> str | Callable[..., object]:
    if callable(value):
        return value
    return entry.choice("mode", value, MODES, ", or a callable")
