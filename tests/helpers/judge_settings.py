"""How many cases a judge draws."""

from __future__ import annotations

from hypothesis import Phase, settings


def drawn(share: float = 1) -> settings:
    """Settings for ``share`` of the profile's number of cases, at least two.

    In the short profile a failing case is shown as it was drawn: to look for the smallest one
    takes minutes.
    """
    phases = {Phase.explicit, Phase.reuse, Phase.generate}
    if not settings.default.derandomize:
        phases |= {Phase.shrink}
    return settings(max_examples=max(2, int(settings.default.max_examples * share)), phases=phases)
