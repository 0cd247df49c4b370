// The log: follows its end unless the user scrolled up, searches, fetches earlier lines.

/** Codes for a terminal's colours, cursor, links and titles, which formats.py takes out too. */
// eslint-disable-next-line no-control-regex -- they begin with an escape character
const CODES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])/g
/** @param {string} text */
const withoutCodes = (text) => text.replace(CODES, '')

/** @param {{number: number, stream: string, text: string}} line */
const element = ({ number, stream, text }) => {
  const row = document.createElement('div')
  row.className = stream
  row.dataset.number = String(number)
  row.textContent = withoutCodes(text)
  return row
}

const LINES_KEPT = 5000
/** Prefix of the lines of further ranks. */
const RANK = /^\[rank (\d+)\] /
/** @param {string} text */
const rankOf = (text) => RANK.exec(text)?.[1] ?? '0'

/** @param {Found} section @param {string} api */
export const createLog = (section, api) => {
  const part = (name) => section.querySelector(`[data-log-${name}]`)
  const [box, follow, search, found, earlier, rank] = ['lines', 'follow', 'search', 'found', 'earlier', 'rank'].map(
    part,
  )

  const toEnd = () => {
    if (follow.checked) box.scrollTop = box.scrollHeight
  }
  /** @param {HTMLElement} row @param {string} text */
  const filter = (row, text) => {
    const isOfRank = rank.value === '' || rank.value === rankOf(row.textContent)
    row.hidden = !isOfRank || (text !== '' && !row.textContent.toLowerCase().includes(text))
  }
  /** Offer the ranks of these lines, once there is a further one. @param {Iterable<Element>} rows */
  const offerRanks = (rows) => {
    const known = new Set([...rank.options].map((option) => option.value))
    for (const row of rows) {
      const number = rankOf(row.textContent)
      if (number === '0' || known.has(number)) continue
      known.add(number)
      const later = [...rank.options].find((option) => Number(option.value) > Number(number))
      rank.insertBefore(new Option(`Rank ${number}`, number), later ?? null)
    }
    rank.hidden = rank.options.length < 3
  }
  const searchText = () => search.value.trim().toLowerCase()

  const countHits = () => {
    const hits = box.querySelectorAll(':scope > :not([hidden])').length
    found.textContent =
      searchText() || rank.value !== ''
        ? `${hits} of ${box.children.length} ${box.children.length === 1 ? 'line' : 'lines'}`
        : ''
  }

  box.addEventListener('scroll', () => {
    follow.checked = box.scrollHeight - box.scrollTop - box.clientHeight < 30
  })
  follow.addEventListener('change', toEnd)
  const filterAll = () => {
    for (const row of box.children) filter(row, searchText())
    countHits()
  }
  search.addEventListener('input', filterAll)
  rank.addEventListener('change', filterAll)
  earlier.addEventListener('click', async () => {
    const first = Number(box.firstElementChild?.dataset.number ?? 1)
    const { log: lines, next } = await (await fetch(`${api}/log?before=${first}`)).json()
    const height = box.scrollHeight
    const rows = lines.map(element)
    offerRanks(rows)
    for (const row of rows) filter(row, searchText())
    box.prepend(...rows)
    countHits()
    box.scrollTop += box.scrollHeight - height
    earlier.hidden = next === null || next === 1
  })
  offerRanks(box.children)
  toEnd()

  return {
    /** A box that is hidden has no end to go to. */
    show: toEnd,
    /** @param {any[]} lines */
    add: (lines) => {
      const seen = Number(box.lastElementChild?.dataset.number ?? 0)
      const rows = lines.filter(({ number }) => number > seen).map(element)
      offerRanks(rows)
      for (const row of rows) filter(row, searchText())
      if (box.childElementCount === 0) box.replaceChildren()
      box.append(...rows)
      while (box.childElementCount > LINES_KEPT && follow.checked) {
        box.firstElementChild.remove()
        earlier.hidden = false
      }
      toEnd()
    },
  }
}
