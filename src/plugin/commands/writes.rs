//! Commands that write: approve, deny, pause, resume, wake, stop, budget top-up.

use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::api::PostParams;
use kube::{Api, ResourceExt};

use super::tasks::random_digits;
use crate::api::budget::{BudgetLimits, TopUp};
use crate::api::{Agent, AgentBudget};
use crate::plugin::arguments::{AnswerArgs, TopUpArgs};
use crate::plugin::failure::{ExitStatus, PluginError};
use crate::plugin::screens::approvals;
use crate::plugin::session::{PluginSession, Screen};
use crate::plugin::writes::answers::{self, AnswerRequest};
use crate::plugin::writes::{PlannedWrite, loop_requests, top_up as top_ups, write};

/// A request to a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoopRequest {
    Pause,
    Resume,
    Wake,
    Stop { at_once: bool },
}

/// Sends the request to each Agent; a failure does not keep the others from receiving it.
pub(super) async fn request(
    session: &PluginSession,
    agents: &[String],
    request: LoopRequest,
    screen: &mut Screen<'_>,
) -> Result<ExitStatus, PluginError> {
    let mut status = ExitStatus::Success;
    let mut shown = Ok(());
    for name in agents {
        let plan = |agent: &Agent| match request {
            LoopRequest::Pause => Ok(loop_requests::pause(name, agent)),
            LoopRequest::Resume => loop_requests::resume(name, agent, session.now()),
            LoopRequest::Wake => Ok(loop_requests::wake(name, agent, session.now())),
            LoopRequest::Stop { at_once } => loop_requests::stop(name, agent, at_once, session.now()),
        };
        match write(&session.agents(), ("Agent", &session.named(name)), plan).await {
            Ok(message) => shown = shown.and(screen.result(&format!("{message}\n"))),
            Err(error) => {
                screen.note(&format!("error: {error}"));
                status = ExitStatus::Failure;
            }
        }
    }
    shown.map(|()| status)
}

pub(super) async fn answer(
    session: &PluginSession,
    arguments: &AnswerArgs,
    approves: bool,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let request = AnswerRequest {
        approves,
        gate: arguments.gate.clone(),
        all: arguments.all,
        user: user(session).await?,
    };
    let name = session.named(&arguments.name);
    let mut pinned = None;
    let message = if arguments.budget {
        let plan = |budget: &AgentBudget| {
            answers::plan(
                &arguments.name,
                &approvals::of_budget(budget),
                budget.annotations(),
                &request,
                &mut pinned,
            )
        };
        write(&session.budgets(), ("AgentBudget", &name), plan).await?
    } else {
        let plan = |agent: &Agent| {
            answers::plan(
                &arguments.name,
                &approvals::of_agent(agent),
                agent.annotations(),
                &request,
                &mut pinned,
            )
        };
        match write(&session.agents(), ("Agent", &name), plan).await {
            Ok(message) => message,
            Err(error) if is_budget(session, &arguments.name).await => {
                return Err(PluginError::Refused(format!(
                    "{error}, but an AgentBudget of this name does: add --budget"
                )));
            }
            Err(error) => return Err(error),
        }
    };
    screen.result(&format!("{message}\n"))
}

/// Whether the name is that of an AgentBudget and of no Agent, as far as the user may read.
async fn is_budget(session: &PluginSession, name: &str) -> bool {
    matches!(session.agents().get_opt(name).await, Ok(None))
        && matches!(session.budgets().get_opt(name).await, Ok(Some(_)))
}

/// The name of the user, as the API server knows it.
async fn user(session: &PluginSession) -> Result<String, PluginError> {
    let reviews: Api<SelfSubjectReview> = Api::all(session.client.clone());
    let answer = reviews
        .create(&PostParams::default(), &SelfSubjectReview::default())
        .await;
    let answer = answer.map_err(|error| PluginError::cluster("get your user name", &error))?;
    let user = answer.status.and_then(|status| status.user_info);
    let name = user.and_then(|user| user.username).filter(|name| !name.is_empty());
    name.ok_or_else(|| PluginError::Refused("the API server did not return your user name".into()))
}

pub(super) async fn top_up(
    session: &PluginSession,
    arguments: TopUpArgs,
    screen: &mut Screen<'_>,
) -> Result<(), PluginError> {
    let id = match arguments.id {
        Some(id) => id,
        None => top_ups::id_of(session.now(), &random_digits::<6>()?),
    };
    let new = TopUp {
        id,
        amount: BudgetLimits {
            tokens: arguments.amount.tokens,
            input_tokens: arguments.amount.input_tokens,
            output_tokens: arguments.amount.output_tokens,
            calls: arguments.amount.calls,
            cost_usd: arguments.amount.cost_usd,
        },
        reason: arguments.reason,
    };
    let name = session.named(&arguments.name);
    let plan =
        |budget: &AgentBudget| -> Result<PlannedWrite, PluginError> { top_ups::plan(&arguments.name, budget, &new) };
    let message = write(&session.budgets(), ("AgentBudget", &name), plan).await?;
    screen.result(&format!("{message}\n"))
}
