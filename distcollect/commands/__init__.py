"""``distcollect COMMAND``: one module or package for each command."""
