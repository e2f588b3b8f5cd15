"""Names of serving engines that change with their releases: one module a release and purpose."""
