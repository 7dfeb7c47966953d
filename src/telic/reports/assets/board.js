// Keeps the list of runs up to date; what is ticked stays ticked.
(() => {
  "use strict";
  const table = document.getElementById("rows");
  async function follow() {
    for (;;) {
      await new Promise((done) => setTimeout(done, 3000));
      try {
        const answer = await fetch("/rows", { cache: "no-store" });
        if (!answer.ok) continue;
        const ticked = new Set([...table.querySelectorAll("input:checked")].map((box) => box.value));
        const focused = document.activeElement instanceof HTMLInputElement ? document.activeElement.value : null;
        table.innerHTML = await answer.text();
        for (const box of table.querySelectorAll("input")) {
          box.checked = ticked.has(box.value);
          if (box.value === focused) box.focus();
        }
      } catch (error) {
        // The board has ended; what is shown stays.
      }
    }
  }
  follow();
})();
