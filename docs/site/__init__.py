"""The documentation site: `make docs` assembles its pages with this and builds them with Sphinx."""
