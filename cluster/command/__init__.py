"""The commands of `legato`, each a file; `cluster.__main__` is the door to them."""
