"""Declaring an op: what it is, which candidates compute it, and on which cases."""
