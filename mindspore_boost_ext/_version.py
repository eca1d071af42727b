"""The version of the package, in a file that the build reads without importing MindSpore."""

__version__ = "0.2.0"
