# Everything a person or CI runs. The work is done by the scripts under hack/; this file only names them.

# Builds are kept outside the clone, so that a fresh clone is warm.
export CARGO_TARGET_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/agentloop/target

.DEFAULT_GOAL := help
.PHONY: help try demo demo-down test upgrade-test soak bench check lint generate image emulate deploy dashboards-shot clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

try: ## Two scripted agents in one process for 20 seconds: no cluster, no root
	@hack/try.sh

demo: ## A real cluster on this machine, agentloop on it, an Agent that runs (CONTEXT=name IMAGE=ref: your cluster)
	@hack/demo.sh

demo-down: ## Remove what `make demo` made
	@hack/demo.sh down

test: ## Every test, on real clusters that it starts and stops (root)
	@hack/test.sh

upgrade-test: ## An upgrade from an older version with live Agents, and the rollback (root; FROM=ref: the newest tag, else 100 commits back)
	@hack/test.sh upgrade $(FROM)

soak: ## SCHEDULES=2000000 of the ledger's simulation, SENSOR_SCHEDULES=100000 of the Sensors', MODE_SCHEDULES=20000 of the modes', then the upgrade and the end-to-end tests repeatedly, for MINUTES=60
	@hack/test.sh soak

bench: ## Measure engine, ledger, gateway, leases, and the controller beside other operators (SIZES=200,1000)
	@hack/bench/run.sh

check: ## Format, lints, tests that need no cluster, generated files unchanged
	@hack/check.sh

lint: ## Scripts with shellcheck; the chart with helm, kubeconform, checkov and kube-score; dashboards, pages and dependencies
	@hack/lint.sh all

generate: ## Regenerate crds/, deploy/, references and the chart's README
	@hack/generate.sh

image: ## The static binary as an OCI image in target/image, without Docker (PLATFORMS=linux/amd64,linux/arm64)
	@hack/image.sh

emulate: ## Build the image for arm64 too, and run its binary under emulation
	@hack/emulate.sh

deploy: ## Install or upgrade in the cluster of the current kube context (IMAGE=ref that it can pull)
	@hack/deploy.sh

dashboards-shot: ## Pictures of the dashboards in docs/images, of a real cluster that it starts and stops (root; PROMETHEUS_URL: of yours)
	@hack/dashboards/shot.sh

clean: ## Remove what was built here; the tools of the dev cluster stay in ~/.cache/agentloop
	rm -rf target "$(CARGO_TARGET_DIR)"
