"""Parts shared by the mixers and the backbones."""
