"""Other projects that distcollect works with, each in a place of its own."""
