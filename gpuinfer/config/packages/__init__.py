"""Plugins as packages: written from a template, installed, upgraded and removed by name."""
