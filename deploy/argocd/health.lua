-- Health of Agents, AgentBudgets and Sensors for Argo CD; docs/tasks/gitops.md says how to install it.
-- The rules are those of kstatus, with the health "Suspended" for objects that a user has suspended.
local function result(status, message)
  return { status = status, message = message }
end

local status = obj.status
if status == nil or status.conditions == nil then
  return result("Progressing", "waiting for the controller")
end
if status.observedGeneration ~= nil and status.observedGeneration ~= obj.metadata.generation then
  return result("Progressing", "waiting for the controller to read the new spec")
end

local conditions = {}
for _, condition in ipairs(status.conditions) do
  conditions[condition.type] = condition
end
local function holds(name)
  return conditions[name] ~= nil and conditions[name].status == "True"
end
local function explained(condition)
  return condition.reason .. ": " .. (condition.message or "")
end

if holds("Reconciling") then
  return result("Progressing", explained(conditions.Reconciling))
end
if holds("Stalled") then
  return result("Degraded", explained(conditions.Stalled))
end
if conditions.Ready == nil or conditions.Ready.status ~= "True" then
  return result("Progressing", "waiting for the condition Ready")
end
if holds("Suspended") then
  return result("Suspended", explained(conditions.Suspended))
end
return result("Healthy", explained(conditions.Ready))
