//! A port of this machine that leads to the pod of the leader, through the API server.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use super::LinkFailure;
use crate::plugin::cluster_errors::problem as problem_of;

/// Label of the pod that leads.
const LEADER: &str = "agentloop.dev/leader=true,app.kubernetes.io/part-of=agentloop";
/// Name of the link's port in the pod of the controller.
const PORT_NAME: &str = "link";
/// Maximum number of connections at a time.
const MAX_CONNECTIONS: usize = 8;

/// The port-forward; ends when it is dropped.
pub(super) struct PortForward {
    address: SocketAddr,
    /// Why the last connection failed, if it did.
    problem: Arc<Mutex<Option<String>>>,
    task: JoinHandle<()>,
}

impl Drop for PortForward {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PortForward {
    /// Listens on a free port of the loopback address. Fails if no pod leads now.
    pub(super) async fn open(client: &Client, namespace: &str) -> Result<Self, LinkFailure> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        leader(&pods, namespace).await.map_err(LinkFailure::Unreachable)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.map_err(|error| LinkFailure::Unreachable(format!("cannot listen: {error}")))?;
        let address = listener.local_addr();
        let address = address.map_err(|error| LinkFailure::Unreachable(format!("cannot listen: {error}")))?;
        let problem = Arc::default();
        let task = tokio::spawn(serve(listener, pods, namespace.to_owned(), Arc::clone(&problem)));
        Ok(Self { address, problem, task })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes the reason for which the last connection failed.
    pub(super) fn take_problem(&self) -> Option<String> {
        self.problem.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

async fn serve(listener: TcpListener, pods: Api<Pod>, namespace: String, problem: Arc<Mutex<Option<String>>>) {
    let mut open = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        while open.try_join_next().is_some() {}
        if open.len() >= MAX_CONNECTIONS {
            continue;
        }
        let (pods, namespace, problem) = (pods.clone(), namespace.clone(), Arc::clone(&problem));
        open.spawn(async move {
            let failed = forward(stream, &pods, &namespace).await.err();
            *problem.lock().unwrap_or_else(PoisonError::into_inner) = failed;
        });
    }
}

/// Copies one connection until one side closes it. Another pod may lead by now, so it is looked up each time.
async fn forward(mut stream: TcpStream, pods: &Api<Pod>, namespace: &str) -> Result<(), String> {
    let (name, port) = leader(pods, namespace).await?;
    let refused = |error: &kube::Error| {
        format!(
            "cannot open a port-forward to pod {name} of namespace {namespace}: {}; it needs the verbs get and create on \
             pods/portforward there",
            problem_of(error)
        )
    };
    let mut forwarder = pods
        .portforward(&name, &[port])
        .await
        .map_err(|error| refused(&error))?;
    let Some(mut remote) = forwarder.take_stream(port) else {
        return Err(format!("the port-forward to pod {name} has no stream"));
    };
    let problem = forwarder.take_error(port);
    // A connection that ends is no failure of the port-forward: its user sees it.
    let _ = copy_bidirectional(&mut stream, &mut remote).await;
    match problem.and_then(FutureExt::now_or_never).flatten() {
        Some(problem) => Err(format!("the port-forward to pod {name} failed: {problem}")),
        None => Ok(()),
    }
}

/// Name of the pod that leads, and the port of the link in it.
async fn leader(pods: &Api<Pod>, namespace: &str) -> Result<(String, u16), String> {
    let found = pods.list(&ListParams::default().labels(LEADER)).await;
    let found = found.map_err(|error| {
        format!(
            "cannot list the pods of namespace {namespace}, to find the controller: {}",
            problem_of(&error)
        )
    })?;
    let running = found
        .items
        .into_iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none());
    let pod = running.max_by_key(|pod| pod.metadata.creation_timestamp.clone().map(|time| time.0));
    let pod = pod.ok_or_else(|| {
        format!(
            "no pod of the controller leads in namespace {namespace}: name another namespace with --controller-namespace, \
             or see `kubectl agentloop check`"
        )
    })?;
    Ok((pod.name_any(), link_port(&pod)))
}

fn link_port(pod: &Pod) -> u16 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    let port = ports.find(|port| port.name.as_deref() == Some(PORT_NAME));
    let port = port.and_then(|port| u16::try_from(port.container_port).ok());
    port.unwrap_or(super::user_link::LINK_PORT)
}
