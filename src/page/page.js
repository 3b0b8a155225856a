"use strict";
const connection = document.getElementById("connection");
const stream = new EventSource("events" + location.search);
stream.onopen = () => { connection.textContent = "Live"; };
stream.onerror = () => {
  connection.textContent = stream.readyState === EventSource.CLOSED ? "Not live: reload the page" : "Not connected: trying again";
};
stream.addEventListener("part", (event) => {
  const { id, html } = JSON.parse(event.data);
  const part = document.getElementById(id);
  // An Agent that the document does not have yet.
  if (!part) location.reload();
  else part.innerHTML = html;
});
stream.addEventListener("end", (event) => {
  stream.close();
  connection.textContent = JSON.parse(event.data);
});
