"""What a missing optional package is told as."""


def missing(package: str, extra: str, who: str) -> ImportError:
    """Give the error for a tracker whose package is not installed."""
    return ImportError(f"{who} needs the package {package}, which is not installed: pip install 'telic[{extra}]'")
