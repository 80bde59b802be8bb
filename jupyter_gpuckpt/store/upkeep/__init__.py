"""Keeping a store in order: find damage, mend it, delete what nobody needs, write packs again."""
