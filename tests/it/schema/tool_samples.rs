//! Rows for the rules of built-in tools, and of servers that are containers.

use serde_json::{Value, json};

use super::samples::{Row, authority, row, scripted, with};

fn tools(tools: &Value) -> Value {
    with(scripted(), &json!({"spec": {"tools": tools}}))
}

fn toolbox(builtin: &Value, toolbox: &Value) -> Value {
    tools(&json!({"builtin": builtin, "toolbox": toolbox}))
}

fn container(container: &Value) -> Value {
    server(&json!({"container": container}))
}

fn server(fields: &Value) -> Value {
    let mut server = json!({"name": "github"});
    server
        .as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    tools(&json!({"servers": [server]}))
}

/// The rules of one tool of a server.
fn rules(mut rules: Value) -> Value {
    rules["name"] = json!("pay");
    json!({"url": "http://files/mcp", "tools": [rules]})
}

fn environment(sources: &Value) -> Value {
    container(&json!({"image": "i", "command": ["x"], "envFrom": sources}))
}

pub(super) fn rows() -> Vec<Row> {
    let mut rows = of_containers();
    rows.push(of_conditions());
    rows.push(of_tls());
    rows
}

fn of_conditions() -> Row {
    row(
        "tools[].approvalCondition has no effect with approval: Always",
        vec![
            server(&rules(
                json!({"approval": "Never", "approvalCondition": "arguments.amount > 100"}),
            )),
            server(&rules(json!({"approval": "Always"}))),
        ],
        vec![server(&rules(
            json!({"approval": "Always", "approvalCondition": "true"}),
        ))],
    )
}

fn of_tls() -> Row {
    row(
        "spec.tools.servers[].tls requires a url that starts with https://",
        vec![
            server(&json!({"url": "https://a/mcp", "tls": authority()})),
            server(&json!({"url": "http://a/mcp"})),
        ],
        vec![
            server(&json!({"url": "http://a/mcp", "tls": authority()})),
            server(&json!({"container": {"image": "i", "port": 80}, "tls": authority()})),
        ],
    )
}

fn of_containers() -> Vec<Row> {
    let image = || json!({"image": "debian:13"});
    vec![
        row(
            "spec.tools.builtin has Shell, which needs spec.tools.toolbox.image",
            vec![
                toolbox(&json!(["Shell", "Files"]), &image()),
                tools(&json!({"builtin": ["Files"]})),
            ],
            vec![
                tools(&json!({"builtin": ["Shell"]})),
                toolbox(&json!(["Files", "Shell"]), &json!({"tools": []})),
            ],
        ),
        row(
            "spec.tools.builtin has HTTP, which needs spec.tools.toolbox.http.allowedHosts",
            vec![toolbox(
                &json!(["HTTP"]),
                &json!({"http": {"allowedHosts": ["example.com", "*.example.com:8443", "*", "[::1]:80"]}}),
            )],
            vec![
                tools(&json!({"builtin": ["HTTP"]})),
                toolbox(&json!(["HTTP"]), &image()),
            ],
        ),
        row(
            "spec.tools.toolbox has no effect without spec.tools.builtin",
            vec![toolbox(&json!(["Files"]), &image())],
            vec![tools(&json!({"toolbox": image()})), toolbox(&json!([]), &image())],
        ),
        row(
            "spec.tools.toolbox.tools[].name must be shell, read_file",
            vec![toolbox(
                &json!(["Files"]),
                &json!({"tools": [{"name": "write_file", "effect": "Write"}, {"name": "read_file"}]}),
            )],
            vec![toolbox(
                &json!(["Files"]),
                &json!({"tools": [{"name": "toolbox__write_file"}]}),
            )],
        ),
        row(
            "spec.tools.servers[] must have either url or container",
            vec![
                server(&json!({"url": "http://a/mcp"})),
                container(&json!({"image": "i", "command": ["x"]})),
            ],
            vec![
                server(&json!({})),
                server(&json!({"url": "http://a/mcp", "container": {"image": "i", "port": 80}})),
            ],
        ),
        row(
            "spec.tools.servers[].headersSecretRef is for servers with a url",
            vec![server(
                &json!({"url": "http://a/mcp", "headersSecretRef": {"name": "s"}}),
            )],
            vec![server(
                &json!({"container": {"image": "i", "port": 80}, "headersSecretRef": {"name": "s"}}),
            )],
        ),
        row(
            "spec.tools.servers[].name must not be toolbox",
            vec![server(&json!({"name": "toolbox2", "url": "http://a/mcp"}))],
            vec![server(&json!({"name": "toolbox", "url": "http://a/mcp"}))],
        ),
        row(
            "spec.tools.servers[].container.command is required",
            vec![
                container(&json!({"image": "i", "command": ["npx", "server"]})),
                container(&json!({"image": "i", "port": 8000})),
            ],
            vec![
                container(&json!({"image": "i"})),
                container(&json!({"image": "i", "command": [], "args": ["x"]})),
            ],
        ),
        row(
            "spec.tools.servers[].container.path has no effect without port",
            vec![container(
                &json!({"image": "i", "port": 8000, "path": "/v1/mcp?set=all"}),
            )],
            vec![container(&json!({"image": "i", "command": ["x"], "path": "/mcp"}))],
        ),
        row(
            "spec.tools.servers[].container.envFrom[] must have either secretRef or configMapRef",
            vec![environment(
                &json!([{"secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}]),
            )],
            vec![
                environment(&json!([{}])),
                environment(&json!([{"secretRef": {"name": "s"}, "configMapRef": {"name": "c"}}])),
            ],
        ),
    ]
}
