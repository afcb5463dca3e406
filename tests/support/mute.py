"""A program that says nothing, until its standard input ends."""

import sys


def main() -> None:
    sys.stdin.read()
