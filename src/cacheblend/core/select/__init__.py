"""Which loaded rows are recomputed: selectors, what they decide by (deviation, the question's attention, cues from
token ids), and the settings that name one (`selection`)."""
