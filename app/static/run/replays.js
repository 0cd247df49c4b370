// Replays of skipped steps that were requested on this page: their rows stay, and a message shows each result.
import { toast } from 'page'

/** Return what stands before a line break, with its exponents. @param {Found} result @param {string} step if it lacks it */
const firstLine = (result, step) => {
  const line = document.createRange()
  line.selectNodeContents(result)
  const end = result.querySelector('br')
  if (end) line.setEndBefore(end)
  const words = line.cloneContents()
  if (!words.textContent.trim().startsWith('In step')) words.prepend(step)
  return words
}

/** @param {Found} table whose rows are updated @param {Found|null} form that requests a replay */
export const createReplays = (table, form) => {
  /** Steps whose results have not come. @type {Set<string>} */
  const requested = new Set()
  const rowOf = (step) => table.querySelector(`tr[data-step="${step}"]`)
  form?.addEventListener('requested', (event) => {
    const { step } = /** @type {any} */ (event).detail
    requested.add(step)
    const row = rowOf(step)
    if (!row || row.querySelector('[data-called=replay]')) return
    row.dataset.kept = ''
    row.querySelector('.replay').innerHTML = '<span class="quiet">Replaying…</span>'
  })
  return {
    /** Show the results that the rows have now. */
    show: () => {
      for (const step of requested) {
        const row = rowOf(step)
        const result = row?.querySelector('[data-called=replay]')
        if (!result) continue
        requested.delete(step)
        toast(firstLine(result, `Step ${row.querySelector('td').textContent}: `), {
          label: 'Show',
          act: () => {
            row.scrollIntoView({ block: 'center' })
            row.classList.add('found')
          },
        })
      }
    },
  }
}
