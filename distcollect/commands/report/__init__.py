"""The command ``report``: one page about a run, from what it has written to its folder."""
