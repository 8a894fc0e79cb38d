from q import *
import sys
def exc(c,keys=('key','pp','iteration','microbatch','chunk','layer')):
    d,s=get(c); h=d['headers']; 
    s['pp']=s['rank'].map({r:h[r].coordinates.pp for r in h})
    s['key']=s.name.str.slice(0,40)+'/'+s.phase.str[:1]
    w=s[s.kind.isin(['compute','optimizer','data'])].copy()
    g=w.groupby(list(keys))['sm']; w['med']=g.transform('median'); w['ex']=w.sm-w.med; w['rel']=w.sm/w.med
    return d,s,w
if __name__=='__main__':
    for c in sys.argv[1:]:
        d,s,w=exc(c)
        x=w[w.kind=='compute']; 
        lv=x[x.name.isin(['forward','backward'])]
        t=lv.pivot_table(index='rank',columns='iteration',values='ex',aggfunc='sum').round(0)
        print(c,'pass self excess ms by rank x iter (ranks with any >30)'); t=t.fillna(0).astype(int); print(t.to_string())
