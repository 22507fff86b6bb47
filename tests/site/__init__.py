"""The documentation site: pages made at the build, and the check of what was built."""
