"""The applications: what the ``bakeoff`` command runs. No module of the library imports one."""
