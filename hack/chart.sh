#!/usr/bin/env bash
# chart.sh VERSION HOMEPAGE IMAGE [REFERENCE]: the chart as an archive under target/chart (or CHART_DIR), for a release: with its address, and the
# image that it installs. IMAGE is repository:tag or repository@digest of the published image. REFERENCE is where the archive will be published,
# for the commands in its texts; oci://REGISTRY/charts/agentloop by default, which readers complete.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
[ $# = 3 ] || [ $# = 4 ] || die "usage: hack/chart.sh VERSION HOMEPAGE IMAGE [REFERENCE]"
version=${1#v} homepage=${2%/} image=$3 reference=${4:-oci://REGISTRY/charts/agentloop}
grep -qx "version: $version" charts/agentloop/Chart.yaml || die "the chart is not of version $version: see charts/agentloop/Chart.yaml"
"$ROOT/hack/devcluster/tools.sh" helm

out=${CHART_DIR:-$ROOT/target/chart}
rm -rf "$out/agentloop"
mkdir -p "$out"
cp -r charts/agentloop "$out/agentloop"
cp LICENSE "$out/agentloop/"
cat >"$out/release" <<END
home: $homepage
sources: [$homepage]
END
cat >"$out/annotations" <<END
  artifacthub.io/images: |
    - name: agentloop
      image: $image
  artifacthub.io/links: |
    - name: Documentation
      url: $homepage/blob/v$version/docs/README.md
    - name: Changes
      url: $homepage/blob/v$version/CHANGELOG.md
    - name: Security
      url: $homepage/blob/v$version/SECURITY.md
END
# Before the maintainers, and as the first annotations.
sed -i -e '/^# hack\/chart.sh adds/d' -e "/^keywords:/r $out/release" -e "/^annotations:/r $out/annotations" "$out/agentloop/Chart.yaml"
case $image in
  *@*) sed -i -e "s|^  repository: .*|  repository: ${image%@*}|" -e "s|^  digest: .*|  digest: ${image#*@}|" "$out/agentloop/values.yaml" ;;
  *) sed -i -e "s|^  repository: .*|  repository: ${image%:*}|" -e "s|^  tag: .*|  tag: \"${image##*:}\"|" "$out/agentloop/values.yaml" ;;
esac
# The runbooks of this version, so that the links in alerts can be opened.
sed -i "s|^    runbookBaseURL: .*|    runbookBaseURL: $homepage/blob/v$version/docs/runbooks|" "$out/agentloop/values.yaml"
# shellcheck disable=SC2016
sed -i 's| No image is published yet: build it with `make image`.||' "$out/agentloop/values.yaml"
# Whoever has the archive has no files of the repository: pages, manifests and the chart have addresses instead.
notes=$out/agentloop/templates/NOTES.txt raw=$homepage/raw/v$version definitions=
for file in crds/*.yaml; do definitions+=" -f $raw/$file"; done
sed -i "s|docs/tasks/|$homepage/blob/v$version/docs/tasks/|g" "$out/agentloop/values.yaml" "$notes"
sed -i -e "s| -f charts/agentloop/files/crds/|$definitions|" -e "s| charts/agentloop | $reference --version $version |" \
  -e "s| -f examples/| -f $raw/examples/|" "$notes"
python3 hack/chart-readme.py "$out/agentloop" "$reference" | sed "s|](../../|]($homepage/blob/v$version/|g" >"$out/README.md"
mv "$out/README.md" "$out/agentloop/README.md"
if grep -nE '(^|[^/[:alnum:]])(charts|crds|deploy|docs/tasks|examples)/' "$notes" "$out/agentloop/README.md" "$out/agentloop/values.yaml"; then
  die "these lines name files of the repository, which the archive does not have"
fi
helm lint --strict --quiet "$out/agentloop"
helm package --destination "$out" "$out/agentloop" >/dev/null
rm -r "$out/agentloop" "$out/release" "$out/annotations"
say "$out/agentloop-$version.tgz"
