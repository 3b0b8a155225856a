//! Which accounts apply to each Agent, and why an Agent may make no call at all. An index maintained from the watches;
//! pure.

use std::collections::{BTreeMap, BTreeSet};

use kube::core::{Selector, SelectorExt};

use super::accounts::{DocumentId, DocumentPart};
use super::facts::{AgentFacts, BudgetFacts, ModelFacts};
use crate::api::NamespacedName;
use crate::api::price::ModelPrice;
use crate::controller::policy::{AgentPrices, PlatformPolicy};
use crate::ledger::price::ModelRates;
use crate::ledger::wallet::AccountId;
use crate::link::messages::{LimitName, PricedModel};

/// Why an Agent may make no call, whatever its limits have left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::AsRefStr, strum::IntoStaticStr, strum::EnumIter)]
pub enum CallObstacleReason {
    /// It names a budget that does not exist.
    BudgetNotFound,
    /// The platform requires a budget, and none applies.
    BudgetRequired,
    /// A cost limit applies, and the [`ModelPrice`] of a model is unknown.
    PriceUnknown,
    /// A budget that applies is invalid or cannot be parsed.
    BudgetUnavailable,
}

/// Why an Agent may make no call; the message names the field and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallObstacle {
    pub reason: CallObstacleReason,
    pub message: String,
}

/// A token limit that is fully available again after a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowedLimit {
    pub tokens: i64,
    /// Length of the window.
    pub seconds: i64,
}

/// The limits of one Agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitDecision {
    /// The accounts that apply.
    pub accounts: Vec<(AccountId, LimitName)>,
    /// Prices by model name, for the models in its spec and those that its pod calls.
    pub prices: BTreeMap<String, ModelPrice>,
    /// Prices of `spec.model` and `spec.lightModel`, for a gateway of version 1 of the link's protocol, which names no
    /// models. Until its pod is replaced it may still call the models of an earlier spec.
    pub unnamed_prices: [Option<ModelPrice>; 2],
    /// Why it may make no call at all.
    pub obstacle: Option<CallObstacle>,
}

/// A budget whose selector is unknown because it cannot be parsed.
#[derive(Clone, Debug)]
struct UnreadableBudget {
    object: NamespacedName,
    problem: String,
}

/// The state that decisions depend on.
#[derive(Debug, Default)]
pub struct AccountAssignments {
    policy: PlatformPolicy,
    own_namespace: String,
    agents: BTreeMap<NamespacedName, AgentFacts>,
    /// The models that pods call, as stated when they attached.
    running: BTreeMap<NamespacedName, Vec<PricedModel>>,
    budgets: BTreeMap<String, BudgetFacts>,
    /// Uids of budgets.
    names: BTreeMap<NamespacedName, String>,
    unreadable: BTreeMap<String, UnreadableBudget>,
    /// Labels of namespaces; `None`: they may not be read.
    namespaces: Option<BTreeMap<String, BTreeMap<String, String>>>,
    decisions: BTreeMap<NamespacedName, LimitDecision>,
    members: BTreeMap<AccountId, BTreeSet<NamespacedName>>,
}

impl AccountAssignments {
    #[must_use]
    pub fn new(policy: PlatformPolicy, own_namespace: &str) -> Self {
        Self {
            policy,
            own_namespace: own_namespace.into(),
            ..Self::default()
        }
    }

    #[must_use]
    pub fn policy(&self) -> &PlatformPolicy {
        &self.policy
    }

    /// The limits of this Agent.
    #[must_use]
    pub fn decision(&self, agent: &NamespacedName) -> Option<&LimitDecision> {
        self.decisions.get(agent)
    }

    #[must_use]
    pub fn agent(&self, agent: &NamespacedName) -> Option<&AgentFacts> {
        self.agents.get(agent)
    }

    /// All Agents of a namespace, or of all namespaces.
    #[must_use]
    pub fn agents(&self, namespace: Option<&str>) -> Vec<NamespacedName> {
        let of = |agent: &&NamespacedName| namespace.is_none_or(|namespace| agent.namespace == namespace);
        self.agents.keys().filter(of).cloned().collect()
    }

    #[must_use]
    pub fn budget(&self, uid: &str) -> Option<&BudgetFacts> {
        self.budgets.get(uid)
    }

    #[must_use]
    pub fn budgets(&self) -> &BTreeMap<String, BudgetFacts> {
        &self.budgets
    }

    /// The Agents that draw on an account.
    pub fn members(&self, account: &str) -> impl Iterator<Item = &NamespacedName> {
        self.members.get(account).into_iter().flatten()
    }

    /// The number of Agents that draw on an account.
    #[must_use]
    pub fn members_of(&self, account: &str) -> usize {
        self.members.get(account).map_or(0, BTreeSet::len)
    }

    /// An Agent was created or changed. Returns whether its limits changed.
    pub fn put_agent(&mut self, agent: &NamespacedName, facts: AgentFacts) -> bool {
        self.agents.insert(agent.clone(), facts);
        self.redecide(agent)
    }

    /// The pod of an Agent calls these models. Returns whether the Agent's limits changed.
    pub fn put_running(&mut self, agent: &NamespacedName, models: &[PricedModel]) -> bool {
        self.running.insert(agent.clone(), models.to_vec());
        self.redecide(agent)
    }

    pub fn remove_agent(&mut self, agent: &NamespacedName) -> Option<AgentFacts> {
        self.running.remove(agent);
        let old = self.decisions.remove(agent).unwrap_or_default();
        self.leave(agent, &old);
        self.agents.remove(agent)
    }

    /// A budget was created or changed. Returns the Agents whose limits changed.
    pub fn put_budget(&mut self, facts: BudgetFacts) -> Vec<NamespacedName> {
        let uid = facts.document.uid.clone();
        if let Some(known) = self.budgets.get_mut(&uid)
            && known.object.spec == facts.object.spec
        {
            // Only the status changed, which is our own write.
            known.object = facts.object;
            return Vec::new();
        }
        let mut touched = self.touched_by(&uid);
        self.unreadable.remove(&uid);
        self.names.insert(facts.document.object.clone(), uid.clone());
        self.budgets.insert(uid.clone(), facts);
        touched.extend(self.touched_by(&uid));
        self.decide_all(&touched)
    }

    /// A budget cannot be parsed. If it could be before, its last valid version stays in force.
    pub fn put_unreadable(&mut self, budget: &DocumentId, problem: &str) -> Vec<NamespacedName> {
        if self.budgets.contains_key(&budget.uid) {
            return Vec::new();
        }
        let unreadable = UnreadableBudget {
            object: budget.object.clone(),
            problem: problem.into(),
        };
        self.unreadable.insert(budget.uid.clone(), unreadable);
        let touched = self.touched_by(&budget.uid);
        self.decide_all(&touched)
    }

    /// A budget was deleted. Returns the Agents whose limits changed.
    pub fn remove_budget(&mut self, uid: &str) -> Vec<NamespacedName> {
        let touched = self.touched_by(uid);
        self.unreadable.remove(uid);
        if let Some(facts) = self.budgets.remove(uid) {
            let name = &facts.document.object;
            if self.names.get(name).is_some_and(|now| now == uid) {
                self.names.remove(name);
            }
        }
        self.decide_all(&touched)
    }

    /// Whether the account belongs to an existing budget, parsed or not, or to an existing Agent.
    #[must_use]
    pub fn knows(&self, account: &str) -> bool {
        let uid = account.split('/').next().unwrap_or(account);
        self.budgets.contains_key(uid)
            || self.unreadable.contains_key(uid)
            || self.agents.values().any(|agent| agent.document.uid == uid)
    }

    /// A namespace was created or relabelled; `None`: it was deleted. Returns the Agents whose limits changed.
    pub fn put_namespace(&mut self, name: &str, labels: Option<BTreeMap<String, String>>) -> Vec<NamespacedName> {
        let all = self.namespaces.get_or_insert_default();
        let before = all.get(name).cloned();
        if before == labels {
            return Vec::new();
        }
        match labels {
            Some(labels) => all.insert(name.into(), labels),
            None => all.remove(name),
        };
        let agents = self.agents(Some(name)).into_iter().collect();
        self.decide_all(&agents)
    }

    /// Replaces all namespaces. Returns the Agents whose limits changed.
    pub fn put_namespaces(&mut self, namespaces: BTreeMap<String, BTreeMap<String, String>>) -> Vec<NamespacedName> {
        self.namespaces = Some(namespaces);
        let agents = self.agents(None).into_iter().collect();
        self.decide_all(&agents)
    }

    /// The Agents that a budget limits or may limit.
    fn touched_by(&self, uid: &str) -> BTreeSet<NamespacedName> {
        let of = |namespace: &str, cross_namespace: bool| {
            let cross_namespace = cross_namespace && namespace == self.own_namespace;
            self.agents((!cross_namespace).then_some(namespace))
                .into_iter()
                .collect()
        };
        if let Some(facts) = self.budgets.get(uid) {
            return of(&facts.document.object.namespace, facts.is_cross_namespace());
        }
        let unreadable = self.unreadable.get(uid);
        unreadable.map_or_else(BTreeSet::new, |unreadable| of(&unreadable.object.namespace, true))
    }

    fn decide_all(&mut self, agents: &BTreeSet<NamespacedName>) -> Vec<NamespacedName> {
        let changed = agents.iter().filter(|agent| self.redecide(agent));
        changed.cloned().collect()
    }

    fn redecide(&mut self, agent: &NamespacedName) -> bool {
        let Some(facts) = self.agents.get(agent) else {
            return false;
        };
        let new = self.decide(agent, facts);
        let old = self.decisions.get(agent).cloned();
        if old.as_ref() == Some(&new) {
            return false;
        }
        self.leave(agent, &old.unwrap_or_default());
        for (account, _) in &new.accounts {
            self.members.entry(account.clone()).or_default().insert(agent.clone());
        }
        self.decisions.insert(agent.clone(), new);
        true
    }

    fn leave(&mut self, agent: &NamespacedName, decision: &LimitDecision) {
        for (account, _) in &decision.accounts {
            if let Some(members) = self.members.get_mut(account) {
                members.remove(agent);
                if members.is_empty() {
                    self.members.remove(account);
                }
            }
        }
    }

    fn decide(&self, agent: &NamespacedName, facts: &AgentFacts) -> LimitDecision {
        // Fails closed: whatever is unknown about a budget that may apply is an obstacle, and an Agent with an obstacle
        // makes no calls.
        let mut decision = LimitDecision::default();
        let mut obstacles = FirstObstacle::default();
        let mut costly = None;
        // The first cost limit of the platform itself: prices written by tenants do not count for it.
        let mut platform_limit = None;
        let named = facts.refs.iter().filter_map(|name| {
            let uid = self.names.get(&NamespacedName::new(&agent.namespace, name));
            if uid.is_none() && !self.unreadable_named(agent, name) {
                obstacles.add(
                    CallObstacleReason::BudgetNotFound,
                    format!(
                        "spec.budgetRefs: AgentBudget {name} does not exist in this namespace: create it, or correct the \
                         name; no calls are made until then"
                    ),
                );
            }
            uid.and_then(|uid| self.budgets.get(uid))
        });
        let mut applying: BTreeMap<&str, &BudgetFacts> =
            named.map(|facts| (facts.document.uid.as_str(), facts)).collect();
        for budget in self.budgets.values() {
            match self.selects(budget, agent, facts) {
                Ok(true) => {
                    applying.insert(&budget.document.uid, budget);
                }
                Ok(false) => {}
                Err(problem) => obstacles.add(CallObstacleReason::BudgetUnavailable, problem),
            }
        }
        for budget in applying.values() {
            let name = limit_name(budget, agent);
            match &budget.terms {
                Ok(_) => {
                    let account = budget.document.account(DocumentPart::Budget);
                    decision.accounts.push((account, LimitName::Budget(name.clone())));
                    if budget.limits_cost() {
                        costly.get_or_insert(format!("AgentBudget {name}"));
                        if budget.is_cross_namespace() {
                            platform_limit.get_or_insert(format!("AgentBudget {name}"));
                        }
                    }
                }
                Err(problem) => obstacles.add(
                    CallObstacleReason::BudgetUnavailable,
                    format!("AgentBudget {name} is invalid: {problem}"),
                ),
            }
        }
        for unreadable in self.unreadable.values().filter(|budget| self.may_limit(budget, agent)) {
            obstacles.add(
                CallObstacleReason::BudgetUnavailable,
                format!(
                    "AgentBudget {} cannot be parsed, so its selector is unknown: {}",
                    unreadable.object, unreadable.problem
                ),
            );
        }
        if self.policy.require_budget && decision.accounts.is_empty() {
            obstacles.add(
                CallObstacleReason::BudgetRequired,
                "the platform requires an AgentBudget for every Agent, but none selects this one: name one in \
                 spec.budgetRefs, or add the labels that an AgentBudget selects"
                    .into(),
            );
        }
        match &facts.own {
            Ok(own) => {
                for own in own.iter().filter(|own| !own.terms.limits.is_empty()) {
                    let name = match own.part {
                        DocumentPart::TokensPerHour => LimitName::TokensPerHour,
                        DocumentPart::Total | DocumentPart::Budget => LimitName::Total,
                    };
                    decision.accounts.push((facts.document.account(own.part), name));
                    if own.terms.limits.cost.is_some() {
                        costly.get_or_insert("spec.guardrails.total.costUSD".into());
                    }
                }
            }
            Err(problem) => obstacles.add(CallObstacleReason::BudgetUnavailable, problem.clone()),
        }
        let trust = match platform_limit {
            _ if self.policy.agent_prices == AgentPrices::Deny => PriceTrust::PlatformOnly("the platform"),
            Some(ref budget) => PriceTrust::PlatformOnly(budget),
            None => PriceTrust::Agents,
        };
        decision.prices = self.prices(agent, facts, trust);
        if self.running.get(agent).is_some_and(Vec::is_empty) {
            decision.unnamed_prices = ["spec.model", "spec.lightModel"].map(|field| {
                let named = facts.models.iter().find(|model| model.field == field)?;
                decision.prices.get(&named.model.name).cloned()
            });
        }
        if let Some(limit) = costly {
            for model in &facts.models {
                let price = decision.prices.get(&model.model.name);
                check_price(model, price, (trust, &limit), &mut obstacles);
            }
        }
        decision.obstacle = obstacles.first;
        decision
    }

    /// The known [`ModelPrice`]s of all models that the Agent's spec names or its pod calls.
    fn prices(
        &self,
        agent: &NamespacedName,
        facts: &AgentFacts,
        trust: PriceTrust<'_>,
    ) -> BTreeMap<String, ModelPrice> {
        let named: Vec<&PricedModel> = facts.models.iter().map(|model| &model.model).collect();
        let called: Vec<&PricedModel> = self.running.get(agent).into_iter().flatten().collect();
        let own = |name: &str| match trust {
            PriceTrust::Agents => only_price(&named, name).or_else(|| only_price(&called, name)),
            PriceTrust::PlatformOnly(_) => None,
        };
        let all = named.iter().chain(&called).map(|model| &model.name);
        all.filter_map(|name| {
            let price = self.policy.prices.get(name).or_else(|| own(name))?;
            Some((name.clone(), price.clone()))
        })
        .collect()
    }

    /// Whether a budget selects an Agent. `Err`: unknown.
    fn selects(&self, budget: &BudgetFacts, agent: &NamespacedName, facts: &AgentFacts) -> Result<bool, String> {
        let same_namespace = budget.document.object.namespace == agent.namespace;
        if budget.is_cross_namespace() && budget.document.object.namespace != self.own_namespace {
            // Rejected; its own conditions report it.
            return Ok(false);
        }
        let selects = match &budget.selects {
            Ok(selects) => selects,
            Err(problem) if same_namespace || budget.is_cross_namespace() => {
                let name = limit_name(budget, agent);
                return Err(format!("AgentBudget {name} is invalid: {problem}"));
            }
            Err(_) => return Ok(false),
        };
        let matches = |selector: &Selector| selector.matches(&facts.labels);
        if !selects.agents.as_ref().is_some_and(matches) {
            return Ok(false);
        }
        let Some(namespaces) = &selects.namespaces else {
            return Ok(same_namespace);
        };
        if namespaces.selects_all() {
            return Ok(true);
        }
        let labels = self.namespaces.as_ref().and_then(|all| all.get(&agent.namespace));
        match labels {
            Some(labels) => Ok(namespaces.matches(labels)),
            None => Err(format!(
                "AgentBudget {} selects namespaces by label, but the labels of namespace {} are unknown: allow the \
                 controller to list namespaces",
                budget.document.object, agent.namespace
            )),
        }
    }

    fn unreadable_named(&self, agent: &NamespacedName, name: &str) -> bool {
        let named = |budget: &UnreadableBudget| budget.object == NamespacedName::new(&agent.namespace, name);
        self.unreadable.values().any(named)
    }

    fn may_limit(&self, budget: &UnreadableBudget, agent: &NamespacedName) -> bool {
        [&agent.namespace, &self.own_namespace].contains(&&budget.object.namespace)
    }
}

/// Whose [`ModelPrice`]s count in addition to the platform's table.
#[derive(Clone, Copy)]
enum PriceTrust<'a> {
    /// Those in the specs of Agents.
    Agents,
    /// No others, because this limit does not accept them.
    PlatformOnly(&'a str),
}

/// The [`ModelPrice`] of a model, unless different prices are given for the same name.
fn only_price<'a>(models: &[&'a PricedModel], name: &str) -> Option<&'a ModelPrice> {
    let mut given = models
        .iter()
        .filter(|model| model.name == name)
        .filter_map(|model| model.price.as_ref());
    let first = given.next()?;
    given.all(|other| other == first).then_some(first)
}

fn check_price(
    ModelFacts { field, model }: &ModelFacts,
    price: Option<&ModelPrice>,
    (trust, limit): (PriceTrust<'_>, &str),
    obstacles: &mut FirstObstacle,
) {
    let name = &model.name;
    let problem = match (price.map(ModelRates::read), trust) {
        (Some(Ok(_)), _) => return,
        (Some(Err(error)), _) => format!("the price of model {name} is invalid: {error}"),
        (None, PriceTrust::Agents) => format!(
            "the price of model {name} is unknown: set {field}.price (the same for each model of that name), or \
             prices.{name} in the chart"
        ),
        (None, PriceTrust::PlatformOnly(holder)) => format!(
            "the price of model {name} is unknown: add prices.{name} to the chart's values; {holder} ignores \
             {field}.price"
        ),
    };
    obstacles.add(
        CallObstacleReason::PriceUnknown,
        format!("{problem}. {limit} limits costUSD, so no calls are made until then"),
    );
}

/// The first [`CallObstacle`], which is the one reported; missing references are checked first.
#[derive(Default)]
struct FirstObstacle {
    first: Option<CallObstacle>,
}

impl FirstObstacle {
    fn add(&mut self, reason: CallObstacleReason, message: String) {
        self.first.get_or_insert(CallObstacle { reason, message });
    }
}

/// The name of a budget in messages to its Agents.
fn limit_name(budget: &BudgetFacts, agent: &NamespacedName) -> String {
    let document = &budget.document;
    if document.object.namespace == agent.namespace {
        document.object.name.clone()
    } else {
        document.object.to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::api::{Agent, AgentBudget};
    use crate::controller::budget::accounts::DocumentKind;

    fn key() -> NamespacedName {
        NamespacedName::new("shop", "a")
    }

    fn agent(labels: &Value, spec: &Value) -> AgentFacts {
        let mut object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "Agent",
            "metadata": {"name": "a", "namespace": "shop", "uid": "agent", "labels": labels},
            "spec": {"instructions": "x", "model": {"api": "Scripted", "name": "small"}},
        });
        for (field, value) in spec.as_object().unwrap() {
            object["spec"][field] = value.clone();
        }
        AgentFacts::of(&serde_json::from_value::<Agent>(object).unwrap())
    }

    fn budget(place: &str, spec: &Value) -> BudgetFacts {
        let (namespace, name) = place.split_once('/').unwrap();
        let mut object = json!({
            "apiVersion": "agentloop.dev/v1alpha1", "kind": "AgentBudget",
            "metadata": {"name": name, "namespace": namespace, "uid": place},
            "spec": {"limits": {"tokens": 10}, "window": {"lifetime": {}}},
        });
        for (field, value) in spec.as_object().unwrap() {
            object["spec"][field] = value.clone();
        }
        BudgetFacts::of(&Arc::new(serde_json::from_value::<AgentBudget>(object).unwrap()))
    }

    fn document(uid: &str, place: &str) -> DocumentId {
        let (namespace, name) = place.split_once('/').unwrap();
        DocumentId {
            kind: DocumentKind::Budget,
            object: NamespacedName::new(namespace, name),
            uid: uid.into(),
        }
    }

    fn scope(policy: PlatformPolicy, facts: AgentFacts, budgets: Vec<BudgetFacts>) -> AccountAssignments {
        let mut scope = AccountAssignments::new(policy, "system");
        scope.put_agent(&key(), facts);
        for budget in budgets {
            scope.put_budget(budget);
        }
        scope
    }

    fn names(scope: &AccountAssignments) -> Vec<String> {
        let name = |(_, name): &(AccountId, LimitName)| match name {
            LimitName::Budget(name) => name.clone(),
            LimitName::TokensPerHour => "tokensPerHour".into(),
            LimitName::Total => "total".into(),
        };
        scope.decision(&key()).unwrap().accounts.iter().map(name).collect()
    }

    fn obstacle(scope: &AccountAssignments) -> Option<(CallObstacleReason, String)> {
        let obstacle = scope.decision(&key()).unwrap().obstacle.clone();
        obstacle.map(|obstacle| (obstacle.reason, obstacle.message))
    }

    #[test]
    fn every_budget_that_selects_or_is_named_applies_once_and_others_do_not() {
        let budgets = vec![
            budget("shop/all", &json!({"selector": {}})),
            budget("shop/team", &json!({"selector": {"matchLabels": {"team": "a"}}})),
            budget("shop/other", &json!({"selector": {"matchLabels": {"team": "b"}}})),
            budget("shop/named", &json!({})),
            budget("shop/unnamed", &json!({})),
            budget("elsewhere/all", &json!({"selector": {}})),
        ];
        let spec = json!({
            "budgetRefs": [{"name": "named"}, {"name": "all"}],
            "guardrails": {"tokensPerHour": 5, "total": {"tokens": 5}},
        });
        let scope = scope(PlatformPolicy::default(), agent(&json!({"team": "a"}), &spec), budgets);
        assert_eq!(names(&scope), ["all", "named", "team", "tokensPerHour", "total"]);
        assert_eq!(obstacle(&scope), None);
        assert_eq!(scope.members("shop/team").collect::<Vec<_>>(), [&key()]);
    }

    #[test]
    fn a_platform_budget_selects_namespaces_by_label_only_from_the_controllers_own() {
        let spec = json!({"selector": {}, "namespaceSelector": {"matchLabels": {"tier": "free"}}});
        let budgets = vec![budget("system/free", &spec), budget("shop/free", &spec)];
        let mut scope = scope(PlatformPolicy::default(), agent(&json!({}), &json!({})), budgets);
        let (reason, message) = obstacle(&scope).unwrap();
        assert_eq!(reason, CallObstacleReason::BudgetUnavailable, "the labels are unknown");
        assert!(message.contains("system/free"), "{message}");
        let labels = |tier: &str| Some(BTreeMap::from([("tier".to_owned(), tier.to_owned())]));
        assert_eq!(scope.put_namespace("shop", labels("free")), [key()]);
        assert_eq!(
            (names(&scope), obstacle(&scope)),
            (vec!["system/free".to_owned()], None)
        );
        assert_eq!(scope.put_namespace("shop", labels("free")), []);
        assert_eq!(scope.put_namespace("shop", labels("paid")), [key()]);
        assert_eq!(names(&scope), [""; 0]);
    }

    #[test]
    fn an_unparseable_selector_blocks_every_agent_that_it_may_select() {
        let broken = json!({"matchExpressions": [{"key": "team", "operator": "In"}]});
        for (place, spec, blocks) in [
            ("shop/b", json!({"selector": broken}), true),
            ("elsewhere/b", json!({"selector": broken}), false),
            ("system/b", json!({"selector": broken}), false),
            ("system/b", json!({"selector": broken, "namespaceSelector": {}}), true),
            ("system/b", json!({"selector": {}, "namespaceSelector": broken}), true),
            ("shop/b", json!({"selector": broken, "namespaceSelector": {}}), false),
        ] {
            let mut scope = scope(PlatformPolicy::default(), agent(&json!({}), &json!({})), vec![]);
            let told = scope.put_budget(budget(place, &spec));
            assert_eq!(told.len(), usize::from(blocks), "{place} {spec}");
            let message = obstacle(&scope).map(|(_, message)| message);
            assert_eq!(message.is_some(), blocks, "{place} {spec}");
            assert!(message.is_none_or(|message| message.contains("In and NotIn need values")));
            assert_eq!(scope.put_budget(budget(place, &json!({}))).len(), usize::from(blocks));
            assert_eq!(obstacle(&scope), None, "corrected");
        }
    }

    #[test]
    fn a_required_budget_is_one_that_applies_and_not_a_limit_of_its_own() {
        let policy = PlatformPolicy {
            require_budget: true,
            ..PlatformPolicy::default()
        };
        let own = agent(&json!({}), &json!({"guardrails": {"tokensPerHour": 5}}));
        let mut scope = scope(policy, own, vec![]);
        assert_eq!(obstacle(&scope).unwrap().0, CallObstacleReason::BudgetRequired);
        scope.put_budget(budget("shop/all", &json!({"selector": {}})));
        assert_eq!(obstacle(&scope), None);
        scope.remove_budget("shop/all");
        assert_eq!(obstacle(&scope).unwrap().0, CallObstacleReason::BudgetRequired);
    }

    #[test]
    fn a_limit_of_money_needs_a_price_that_the_platform_accepts() {
        let price = |dollars: &str| json!({"inputPerMillion": dollars, "outputPerMillion": "1"});
        let priced = json!({"model": {"api": "Scripted", "name": "small", "price": price("3")}});
        let costly = || {
            vec![budget(
                "shop/all",
                &json!({"selector": {}, "limits": {"costUSD": "1.00"}}),
            )]
        };
        let table = PlatformPolicy {
            prices: BTreeMap::from([("small".to_owned(), serde_json::from_value(price("2")).unwrap())]),
            ..PlatformPolicy::default()
        };
        let deny = PlatformPolicy {
            agent_prices: AgentPrices::Deny,
            ..PlatformPolicy::default()
        };
        for (policy, spec, known) in [
            (PlatformPolicy::default(), json!({}), None),
            (PlatformPolicy::default(), priced.clone(), Some("3")),
            (deny, priced.clone(), None),
            (table, priced, Some("2")),
        ] {
            let scope = scope(policy, agent(&json!({}), &spec), costly());
            let decision = scope.decision(&key()).unwrap();
            let found = decision.prices.get("small");
            let found = found.map(|price| price.input_per_million.as_str());
            assert_eq!(found, known);
            let reason = decision.obstacle.as_ref().map(|obstacle| obstacle.reason);
            assert_eq!(reason, known.is_none().then_some(CallObstacleReason::PriceUnknown));
        }
        let free = scope(
            PlatformPolicy::default(),
            agent(&json!({}), &json!({})),
            vec![budget("shop/all", &json!({"selector": {}}))],
        );
        assert_eq!(obstacle(&free), None, "token limits need no price");
        let told = scope(PlatformPolicy::default(), agent(&json!({}), &json!({})), costly());
        let message = obstacle(&told).unwrap().1;
        assert!(
            message.contains("small") && message.contains("spec.model.price"),
            "{message}"
        );
    }

    #[test]
    fn a_limit_of_money_needs_the_light_models_price_too() {
        let price = json!({"inputPerMillion": "3", "outputPerMillion": "1"});
        let spec = |light: serde_json::Value| {
            let main = json!({"api": "Scripted", "name": "large", "price": price});
            json!({"model": main, "lightModel": light})
        };
        for (light, known) in [
            (json!({"api": "Scripted", "name": "small", "price": price}), true),
            (json!({"api": "Scripted", "name": "small"}), false),
        ] {
            let costly = budget("shop/all", &json!({"selector": {}, "limits": {"costUSD": "1.00"}}));
            let scope = scope(PlatformPolicy::default(), agent(&json!({}), &spec(light)), vec![costly]);
            assert_eq!(scope.decision(&key()).unwrap().prices.contains_key("small"), known);
            let told = obstacle(&scope).map(|(_, message)| message);
            let wanted =
                |message: &str| message.contains("model small") && message.contains("set spec.lightModel.price");
            assert!(told.as_deref().map_or(known, |told| !known && wanted(told)), "{told:?}");
        }
    }

    /// A model as a pod states that it calls it.
    fn called(name: &str, dollars: Option<&str>) -> PricedModel {
        PricedModel {
            name: name.into(),
            price: dollars.map(price_of),
        }
    }

    fn price_of(dollars: &str) -> ModelPrice {
        ModelPrice {
            input_per_million: dollars.into(),
            output_per_million: dollars.into(),
            ..ModelPrice::default()
        }
    }

    /// Prices per million input tokens, by name.
    fn known(scope: &AccountAssignments) -> Vec<(String, String)> {
        let prices = &scope.decision(&key()).unwrap().prices;
        let of = |(name, price): (&String, &ModelPrice)| (name.clone(), price.input_per_million.clone());
        prices.iter().map(of).collect()
    }

    fn model(name: &str, dollars: Option<&str>) -> Value {
        json!({"api": "Scripted", "name": name, "price": dollars.map(price_of)})
    }

    #[test]
    fn a_pod_that_calls_another_model_than_the_spec_receives_the_price_of_that_model() {
        let policy = PlatformPolicy {
            prices: BTreeMap::from([("opus".to_owned(), price_of("75"))]),
            ..PlatformPolicy::default()
        };
        let mut scope = scope(
            policy,
            agent(&json!({}), &json!({"model": model("opus", None)})),
            vec![],
        );
        scope.put_running(&key(), &[called("opus", None)]);
        assert!(scope.put_agent(&key(), agent(&json!({}), &json!({"model": model("nano", Some("0"))}))));
        let of = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            let owned = |(name, price): &(&str, &str)| ((*name).to_owned(), (*price).to_owned());
            pairs.iter().map(owned).collect()
        };
        assert_eq!(known(&scope), of(&[("nano", "0"), ("opus", "75")]));
        // A price that only the old spec gave stays valid for the pod that was created from it.
        assert!(scope.put_running(&key(), &[called("old", Some("9"))]));
        assert_eq!(known(&scope), of(&[("nano", "0"), ("old", "9")]));
        // The pod is replaced.
        assert!(scope.put_running(&key(), &[called("nano", Some("0"))]));
        assert!(
            !scope.put_running(&key(), &[called("nano", Some("7"))]),
            "the latest spec counts"
        );
        assert_eq!(known(&scope), of(&[("nano", "0")]));
    }

    #[test]
    fn two_prices_for_one_name_are_none() {
        let spec = |light| json!({"model": model("m", Some("3")), "lightModel": model("m", light)});
        for (light, found) in [(None, true), (Some("3"), true), (Some("0.1"), false)] {
            let costly = budget("shop/all", &json!({"selector": {}, "limits": {"costUSD": "1.00"}}));
            let scope = scope(PlatformPolicy::default(), agent(&json!({}), &spec(light)), vec![costly]);
            assert_eq!(known(&scope).len(), usize::from(found), "{light:?}");
            let reason = obstacle(&scope).map(|(reason, _)| reason);
            assert_eq!(reason, (!found).then_some(CallObstacleReason::PriceUnknown));
        }
    }

    #[test]
    fn a_platform_budget_that_limits_cost_ignores_prices_of_agents() {
        let far = |limits: &Value| {
            budget(
                "system/all",
                &json!({"selector": {}, "namespaceSelector": {}, "limits": limits}),
            )
        };
        let priced = || agent(&json!({}), &json!({"model": model("m", Some("0"))}));
        let tokens = scope(PlatformPolicy::default(), priced(), vec![far(&json!({"tokens": 10}))]);
        assert_eq!((known(&tokens).len(), obstacle(&tokens)), (1, None));
        let mut money = scope(
            PlatformPolicy::default(),
            priced(),
            vec![far(&json!({"costUSD": "25.00"}))],
        );
        assert_eq!(known(&money), []);
        let (reason, message) = obstacle(&money).unwrap();
        assert_eq!(reason, CallObstacleReason::PriceUnknown);
        for part in ["prices.m", "AgentBudget system/all ignores spec.model.price"] {
            assert!(message.contains(part), "{message}");
        }
        money.remove_budget("system/all");
        assert_eq!((known(&money).len(), obstacle(&money)), (1, None));
        let policy = PlatformPolicy {
            prices: BTreeMap::from([("m".to_owned(), price_of("2"))]),
            ..PlatformPolicy::default()
        };
        let table = scope(policy, priced(), vec![far(&json!({"costUSD": "25.00"}))]);
        assert_eq!(known(&table), [("m".to_owned(), "2".to_owned())]);
        assert_eq!(obstacle(&table), None);
    }

    #[test]
    fn an_unreadable_or_unusable_budget_blocks_calls_and_a_known_one_keeps_its_limits() {
        let zone = json!({"selector": {}, "window": {"calendar": {"period": "Daily", "timeZone": "Mars/Base"}}});
        let unusable = scope(
            PlatformPolicy::default(),
            agent(&json!({}), &json!({})),
            vec![budget("shop/mars", &zone)],
        );
        let (reason, message) = obstacle(&unusable).unwrap();
        assert_eq!(reason, CallObstacleReason::BudgetUnavailable);
        assert!(message.contains("mars") && message.contains("Mars/Base"), "{message}");

        let mut scope = scope(PlatformPolicy::default(), agent(&json!({}), &json!({})), vec![]);
        assert_eq!(scope.put_unreadable(&document("u", "elsewhere/b"), "broken"), []);
        assert_eq!(scope.put_unreadable(&document("v", "shop/b"), "broken"), [key()]);
        assert_eq!(obstacle(&scope).unwrap().0, CallObstacleReason::BudgetUnavailable);
        assert_eq!(scope.remove_budget("v"), [key()]);
        scope.put_budget(budget("shop/all", &json!({"selector": {}})));
        assert_eq!(scope.put_unreadable(&document("shop/all", "shop/all"), "broken"), []);
        assert_eq!((names(&scope), obstacle(&scope)), (vec!["all".to_owned()], None));
    }

    #[test]
    fn the_texts_of_obstacles() {
        let broken = json!({"matchExpressions": [{"key": "team", "operator": "In"}]});
        let dollars = json!({"selector": {}, "limits": {"costUSD": "5.00"}});
        let platform = json!({"selector": {}, "namespaceSelector": {}, "limits": {"costUSD": "5.00"}});
        let far = json!({"selector": {}, "namespaceSelector": {"matchLabels": {"tier": "free"}}});
        let none = || agent(&json!({}), &json!({}));
        let named = agent(&json!({}), &json!({"budgetRefs": [{"name": "team"}]}));
        let priced = agent(&json!({}), &json!({"model": model("small", Some("3,00"))}));
        let required = PlatformPolicy {
            require_budget: true,
            ..PlatformPolicy::default()
        };
        let untrusted = PlatformPolicy {
            agent_prices: AgentPrices::Deny,
            ..PlatformPolicy::default()
        };
        let free = PlatformPolicy::default;
        let scopes = [
            scope(free(), named, vec![]),
            scope(required, none(), vec![]),
            scope(free(), none(), vec![budget("shop/team", &dollars)]),
            scope(free(), priced, vec![budget("shop/team", &dollars)]),
            scope(untrusted, none(), vec![budget("shop/team", &dollars)]),
            scope(free(), none(), vec![budget("system/all", &platform)]),
            scope(free(), none(), vec![budget("shop/team", &json!({"selector": broken}))]),
            scope(free(), none(), vec![budget("system/free", &far)]),
        ];
        let mut rows = Vec::new();
        for scope in scopes {
            let (reason, message) = obstacle(&scope).expect("an obstacle");
            rows.push(text!("Accepted=False", reason.as_ref(), message));
        }
        assert_texts!(
            "agent-budget-obstacles",
            "Agents that may make no call because of their budgets",
            rows
        );
    }
}
