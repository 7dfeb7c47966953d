"""Bridges to other libraries. Each is a module of its own and imports its library when it is used."""
