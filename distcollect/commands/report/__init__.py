"""The command ``report``: makes an HTML page from the statistics of a run."""
