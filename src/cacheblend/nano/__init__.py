"""A small model that ships, and its language: words, sentences, what they say; passages and questions of the demo.

It shows on any laptop what blending does to answers: many answers need more than one passage. The model card is
`model/README.md`; the lab, `lab/nano` in the repository, draws the texts and trains it.
"""

from cacheblend.engines.folders import shipped_folder

LEAN_PROFILE_NAME = "blend-profile-lean.json"
"""Name of the file with settings that compute less and lose a little; beside the profile, in the model's folder."""
model_path = shipped_folder
