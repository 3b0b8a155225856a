# The same image as `make image`, for those who have Docker: docker build -t agentloop .
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock rust-toolchain.toml build.rs ./
COPY src src
# Cargo looks for the roots of tests and benches that Cargo.toml names; they are not compiled.
COPY tests/it/main.rs tests/it/main.rs
COPY hack/bench hack/bench
# An explicit target keeps the static flag away from build scripts and proc macros, which cannot be static.
RUN target="$(uname -m)-unknown-linux-gnu" \
 && RUSTFLAGS="-C target-feature=+crt-static" cargo rustc --locked --release --target "$target" --bin agentloop \
    -- -C link-arg=-Wl,-z,pack-relative-relocs \
 && cp "target/$target/release/agentloop" /agentloop

FROM scratch
COPY --from=build /agentloop /agentloop
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
USER 65532:65532
ENTRYPOINT ["/agentloop"]
