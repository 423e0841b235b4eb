"""The paper's two overviews as Mermaid, which GitHub draws: pretraining (Algorithm 1) and deployment (section 4.3)."""

from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Measured

PRETRAINING = """\
```mermaid
flowchart TB
  subgraph guided["every step: X learns, guided by L and S (eq. 6)"]
    direction LR
    tokens(["batch of tokens"]) --> model["model with<br>dense weights X"]
    model --> loss["task loss ℓ(X)"]
    model --> penalty["penalty ρ/2 · ‖X − L − S + Y/ρ‖²"]
    loss --> gradient["gradient of both,<br>clipped"]
    penalty --> gradient
    gradient --> optimizer["any optimizer"]
    optimizer -- "next X" --> model
  end
  subgraph admm["every K steps, J times, each block on its owner: ADMM (eqs. 3 to 5)"]
    direction LR
    low["singular value threshold<br>L ← SVT(X − S + Y/ρ, α/ρ)"]
    sparse["soft threshold<br>S ← soft(X − L + Y/ρ, β/ρ)"]
    low -- "L" --> sparse
    sparse -- "S" --> dual["Y ← Y + ρ (X − L − S)"]
    low -- "rank ratio Γ" --> alpha["I-controller:<br>α ← α + ρ (Γ − Γ̂) Δα"]
    alpha -- "α" --> low
    sparse -- "density Υ" --> beta["I-controller:<br>β ← β + ρ (Υ − Υ̂) Δβ"]
    beta -- "β" --> sparse
  end
  guided -- "X" --> admm
  admm -- "L, S, Y" --> guided
```"""

DEPLOYMENT = """\
```mermaid
flowchart LR
  checkpoint["one checkpoint:<br>L and S of every block<br>(X only trains)"] --> hpa
  budget(["parameters to remove: C"]) --> hpa
  kappa(["split κ in [0, 1]"]) --> hpa
  hpa["HPA (eqs. 8 and 9)<br>φ_L = κ C / C_L<br>φ_S = (1 − κ) C / C_S"]
  subgraph blocks["the same shares in every block"]
    direction TB
    first["block 1: the smallest φ_L of its singular values<br>and the smallest φ_S of its entries go"]
    second["block 2: φ_L and φ_S likewise"]
    last["block N: φ_L and φ_S likewise"]
    first ~~~ second ~~~ last
  end
  hpa -- "φ_L, φ_S" --> blocks
  blocks -- "C small" --> large["large model L̃ + S̃"]
  blocks -- "C larger" --> medium["medium model L̃ + S̃"]
  blocks -- "C largest" --> small["small model L̃ + S̃"]
```"""


def overview(scale: Scale) -> Measured:
    """Return the diagrams of the two pipelines, which are the same at every scale."""
    return Measured(tables={"pretraining": PRETRAINING, "deployment": DEPLOYMENT})
