//! The page of the controller behind its Service, with tokens of the API server: who may sign in and sees what, and that only the
//! leader serves it.

use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use pretty_assertions::assert_eq;
use reqwest::header::{COOKIE, LOCATION, SET_COOKIE};
use reqwest::redirect::Policy;
use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};

use super::agents::{Agent, script, scripted};
use super::cluster::{self, AGENTS, LEADER, Namespace, SYSTEM, alone, shared};
use super::link_client::{block_on, bundle};
use crate::support::kubectl::Kubectl;

const SERVICE: &str = "agentloop-page";
const PORT: u16 = 8444;

/// What the page answered.
struct Answer {
    status: u16,
    location: String,
    cookie: String,
    body: String,
}

/// A browser that knows the link's authority.
struct Browser {
    client: Client,
    base: String,
    cookie: String,
}

impl Browser {
    /// By way of the Service, under its name in the cluster.
    fn of(system: &Kubectl, kubectl: &Kubectl) -> Self {
        let service = system.get("service", SERVICE).expect("the release has it");
        let address = service["spec"]["clusterIP"].as_str().expect("it has an address");
        Self::at(address.parse().unwrap(), &bundle(kubectl))
    }

    fn at(address: IpAddr, authority: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let host = format!("{SERVICE}.{SYSTEM}.svc");
        let root = reqwest::Certificate::from_pem_bundle(authority.as_bytes()).unwrap();
        let client = Client::builder()
            .tls_certs_only(root)
            .resolve(&host, SocketAddr::new(address, PORT))
            .redirect(Policy::none())
            .timeout(Duration::from_secs(20))
            .no_proxy();
        Self {
            client: client.build().unwrap(),
            base: format!("https://{host}:{PORT}"),
            cookie: String::new(),
        }
    }

    fn send(request: RequestBuilder) -> reqwest::Result<Answer> {
        block_on(async {
            let response = request.send().await?;
            let header = |name| response.headers().get(name).map_or("", |value| value.to_str().unwrap());
            let (location, cookie) = (header(LOCATION).to_owned(), header(SET_COOKIE).to_owned());
            let status = response.status().as_u16();
            let body = response.text().await?;
            Ok(Answer {
                status,
                location,
                cookie,
                body,
            })
        })
    }

    fn try_get(&self, path: &str) -> reqwest::Result<Answer> {
        let request = self.client.get(format!("{}{path}", self.base));
        Self::send(request.header(COOKIE, &self.cookie))
    }

    fn get(&self, path: &str) -> Answer {
        self.try_get(path).unwrap()
    }

    fn post_token(&self, token: &str) -> Answer {
        let request = self.client.post(format!("{}/login", self.base));
        let request = request.header("sec-fetch-site", "same-origin");
        let form = request.header("content-type", "application/x-www-form-urlencoded");
        Self::send(form.body(format!("token={token}"))).unwrap()
    }

    fn sign_in(&mut self, token: &str) {
        let answer = self.post_token(token);
        assert_eq!((answer.status, answer.location.as_str()), (303, "/"), "{}", answer.body);
        answer
            .cookie
            .split(';')
            .next()
            .unwrap_or_default()
            .clone_into(&mut self.cookie);
    }

    /// The page of a namespace, once it is there: a leader that has just begun does not know the Agents yet.
    fn page(&self, namespace: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let answer = self.get(&format!("/?namespace={namespace}"));
            if answer.status == 200 {
                return answer.body;
            }
            assert!(
                answer.status == 503 && Instant::now() < deadline,
                "{} {}",
                answer.status,
                answer.body
            );
            std::thread::park_timeout(Duration::from_millis(200));
        }
    }
}

/// Token of a service account of the namespace, with the role `view` if asked for.
fn account(kubectl: &Kubectl, name: &str, views: bool) -> String {
    kubectl.ok(&["create", "serviceaccount", name]);
    let subject = format!("{}:{name}", kubectl.namespace());
    if views {
        let account = format!("--serviceaccount={subject}");
        kubectl.ok(&["create", "rolebinding", name, "--clusterrole=view", &account]);
        // Roles are aggregated a moment after the chart.
        let account = format!("--as=system:serviceaccount:{subject}");
        let deadline = Instant::now() + Duration::from_secs(30);
        while !kubectl.run(&["auth", "can-i", "get", AGENTS, &account]).success {
            assert!(Instant::now() < deadline, "{subject} may not get Agents");
            std::thread::park_timeout(Duration::from_millis(200));
        }
    }
    kubectl.ok(&["create", "token", name]).trim().to_owned()
}

/// An Agent that sleeps.
fn sleeper<'a>(namespace: &'a Namespace, name: &str) -> Agent<'a> {
    let turns = json!({"turns": [{"text": "I wait.", "yield": {"sleep": 3600}}]});
    namespace.kubectl.apply(&script("sleeper", &turns));
    let agent = Agent::apply(namespace, name, &scripted("sleeper"), &json!({}));
    agent.until_state("Sleeping", 90);
    agent
}

fn listens(pod: &Value) -> bool {
    let address: IpAddr = pod["status"]["podIP"]
        .as_str()
        .expect("it has an address")
        .parse()
        .unwrap();
    TcpStream::connect_timeout(&SocketAddr::new(address, PORT), Duration::from_secs(5)).is_ok()
}

#[test]
fn a_token_of_the_api_server_opens_the_page_with_the_agents_its_user_may_read() {
    let Some(cluster) = shared() else { return };
    let [seen, hidden] = ["page", "page-hidden"].map(|name| Namespace::new(&cluster.system, name));
    sleeper(&seen, "canary-seen");
    sleeper(&hidden, "canary-hidden");
    let mut browser = Browser::of(&cluster.system, &seen.kubectl);
    let first = browser.get("/");
    assert_eq!((first.status, first.location.as_str()), (303, "/login"));
    let refused = browser.post_token("no-token");
    assert_eq!((refused.status, refused.cookie.as_str()), (401, ""));

    browser.sign_in(&account(&seen.kubectl, "viewer", true));
    let (own, other) = (seen.kubectl.namespace(), hidden.kubectl.namespace());
    let page = browser.page(own);
    assert!(page.contains("canary-seen") && page.contains("Sleeping"), "{page}");
    assert!(page.contains(&format!("system:serviceaccount:{own}:viewer")), "{page}");
    let page = browser.page(other);
    assert!(
        !page.contains("canary-hidden") && page.contains("There are no Agents here that"),
        "{page}"
    );

    browser.sign_in(&account(&seen.kubectl, "stranger", false));
    let page = browser.page(own);
    assert!(
        !page.contains("canary-seen") && page.contains("There are no Agents here that"),
        "{page}"
    );
}

#[test]
fn only_the_leader_serves_the_page_and_the_next_leader_requires_a_new_sign_in() {
    let Some(cluster) = alone() else { return };
    let system = &cluster.system;
    let namespace = Namespace::new(system, "page-leader");
    sleeper(&namespace, "canary-seen");
    let own = namespace.kubectl.namespace();
    let token = account(&namespace.kubectl, "viewer", true);
    let mut browser = Browser::of(system, &namespace.kubectl);
    browser.sign_in(&token);
    assert!(browser.page(own).contains("canary-seen"));
    let leader = cluster::leader(system);
    let replicas = cluster::settled(system);
    assert_eq!(replicas.len(), 2);
    for pod in &replicas {
        let leads = pod["metadata"]["uid"] == leader["metadata"]["uid"];
        assert_eq!(listens(pod), leads, "{}", pod["metadata"]["name"]);
    }

    let name = leader["metadata"]["name"].as_str().unwrap();
    let watch = system.watch("pods", &["-l", LEADER]);
    system.ok(&["delete", "pod", name, "--wait=false"]);
    let deadline = Instant::now() + Duration::from_secs(30);
    let is_new = |pod: &Value| pod["metadata"]["uid"] != leader["metadata"]["uid"];
    while !is_new(&watch.next(deadline).expect("another replica leads within 30 s").object) {}
    let deadline = Instant::now() + Duration::from_secs(30);
    // Until the proxy of the node follows the label, the Service has no endpoint.
    let asked = loop {
        match browser.try_get("/") {
            Ok(answer) if answer.status != 503 => break answer,
            other => assert!(Instant::now() < deadline, "{:?}", other.map(|answer| answer.body)),
        }
        std::thread::park_timeout(Duration::from_millis(200));
    };
    assert_eq!(
        (asked.status, asked.location.as_str()),
        (303, "/login"),
        "its session ended"
    );
    browser.sign_in(&token);
    let page = browser.page(own);
    assert!(page.contains("canary-seen") && page.contains("Sleeping"), "{page}");
    cluster::settled(system);
}
