"""`python -m cpbkit` is the same as `cpbkit`."""


def main() -> None:
    """Run the command line."""
    from cpbkit.cli.main import cpbkit  # click loads here, not when something imports the package

    cpbkit()


if __name__ == "__main__":
    main()
