"""In what two layouts differ, in words: for the message that refuses a learner or a checkpoint.

Here: pairing the tensors of two layouts by name and by kind. Not here: what a layout is (layout.py). Standard library
only.
"""

from __future__ import annotations

from .layout import Layout, TensorSpec

__all__ = ["describe_difference"]


def describe_difference(a: Layout, b: Layout, *, max_lines: int = 5) -> str:
    """Say in words in what two layouts differ, for the message of a LayoutMismatch.

    Args:
        a: the layout that is required, the run's.
        b: the layout that came, a learner's or a checkpoint's.
        max_lines: of differences between tensors, >= 1; of the others only the number is said.

    Returns:
        One difference per line: tensors missing, extra, renamed, changed or in another order, then the
        fragments; empty when the fingerprints are equal.
    """
    if a.fingerprint == b.fingerprint:
        return ""
    lines = _tensor_differences(a, b)
    same_tensors = not lines
    if len(lines) > max_lines:
        lines[max_lines:] = [f"and {len(lines) - max_lines} more"]
    fragments: list[str] = []
    if a.policy != b.policy:
        fragments.append(f"policy {a.policy} required, {b.policy} came")
    if len(a.fragments) != len(b.fragments):
        fragments.append(f"{len(a.fragments)} fragments required, {len(b.fragments)} came")
    if same_tensors and not fragments:
        first = next(f.index for f, g in zip(a.fragments, b.fragments, strict=True) if f != g)
        fragments.append(f"the same tensors are cut differently, first in fragment {first}")
    if fragments:
        lines.append("fragments: " + "; ".join(fragments))
    return "\n".join(lines)


def _tensor_differences(a: Layout, b: Layout) -> list[str]:
    required, came = ({spec.name: spec for spec in layout.tensors} for layout in (a, b))
    missing = [spec for spec in a.tensors if spec.name not in came]
    extra = [spec for spec in b.tensors if spec.name not in required]
    renamed: dict[str, str] = {}  # name that came -> name required
    lines: list[str] = []
    for spec in missing:
        twin = next((e for e in extra if e.name not in renamed and _kind(e) == _kind(spec)), None)
        if twin is None:
            lines.append(f"missing: {spec.name} {_in_words(spec)}{_tied_to(spec.name, b)}")
        else:
            renamed[twin.name] = spec.name
            lines.append(f"renamed: {spec.name} required, {twin.name} came, both {_in_words(spec)}")
    for spec in extra:
        if spec.name not in renamed:
            lines.append(f"extra: {spec.name} {_in_words(spec)}{_tied_to(spec.name, a)}")
    order_a = [spec.name for spec in a.tensors if spec.name in came or spec.name in renamed.values()]
    order_b = [renamed.get(s.name, s.name) for s in b.tensors if s.name in required or s.name in renamed]
    moved = next(((x, y) for x, y in zip(order_a, order_b, strict=True) if x != y), None)
    if moved is not None:
        lines.append(f"order: {moved[1]} came where {moved[0]} was required; the order must be the same")
    for spec in a.tensors:
        other = came.get(spec.name)
        if other is None or other == spec:
            continue
        changes = [
            f"{what} {x!r} required, {y!r} came"
            for what, x, y in (
                ("shape", spec.shape, other.shape),
                ("dtype", spec.dtype, other.dtype),
                ("role", spec.role, other.role),
                ("aliases", spec.aliases, other.aliases),
            )
            if x != y
        ]
        lines.append(f"changed: {spec.name}: " + ", ".join(changes))
    return lines


def _kind(spec: TensorSpec) -> tuple[tuple[int, ...], str, str]:
    return spec.shape, spec.dtype, spec.role


def _in_words(spec: TensorSpec) -> str:
    return f"({spec.role}, {spec.dtype} {list(spec.shape)})"


def _tied_to(name: str, layout: Layout) -> str:
    owner = next((spec.name for spec in layout.tensors if name in spec.aliases), None)
    return f"; the other side has it tied to {owner}" if owner else ""
