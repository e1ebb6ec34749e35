"""The benchmark behind ``distcollect bench``: distcollect beside a bare loop and other collectors.

An *item* (:mod:`.items`) is a workload or another figure. It has *parts* (for a workload: the
contenders), which are measured one after the other, each in a process of its own (:mod:`.runner`
starts it, :mod:`.child` runs in it). Each repeat measures every part once, and ratios are taken
within a repeat (:mod:`.stats`): other load on the machine then affects both sides alike.
:mod:`.targets` holds the bounds, :mod:`.report` makes tables and charts.

The rest of the package imports nothing of this, and the benchmark's own process imports no peer.
"""
