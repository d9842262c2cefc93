"""What a router does beyond plain top-K: one rule a file, with its settings, its state, its
mathematics, what it means for an export, and its line in the table of docs/routing.md.

A rule is a pair of classes: `RuleSettings`, which the config parses and the layer takes, and the
`Rule` that it builds (`moe.rules.base`). A kind of your own is an entry in one of the tables of
`moe.config`; no file of this package changes.
"""
