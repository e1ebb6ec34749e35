"""The benchmark behind ``python -m distcollect bench``: distcollect next to a bare loop and peers.

An *item* (:mod:`.items`) is a workload or another figure; it has *parts* (for a workload: the
contenders) that are measured one after the other, each in a process of its own (:mod:`.runner`
starts it, :mod:`.child` runs in it). Repeat r measures every part once, then comes repeat r + 1,
and ratios are taken within a repeat (:mod:`.stats`), so that whatever else the machine does hits
both sides alike. :mod:`.targets` holds what is to be reached, :mod:`.report` what a person sees.

Nothing here is imported by the rest of the package, and no peer by the benchmark's own process.
"""
