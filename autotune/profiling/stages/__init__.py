"""The stages of a profiling run, one file each; :class:`autotune.profiling.session.Session` calls them in turn."""
